"""What the services share: the contract, columns, block keys, server plumbing, the client and the command line."""
