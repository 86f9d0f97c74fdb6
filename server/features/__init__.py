"""What features add to the server: routes, fields of bodies, parts of messages, commands."""
