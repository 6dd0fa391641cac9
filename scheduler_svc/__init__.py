"""Stateless: shown the whole situation each iteration, it says what runs, what boards and what leaves."""
