"""Applies a configuration: attachments, bridges, numbers of guests, tuning."""
