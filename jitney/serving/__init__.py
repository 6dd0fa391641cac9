"""What every service is made of around its core: configuration, server, channels, errors on the wire, logs, traces."""
