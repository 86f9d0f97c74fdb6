"""What features add to the command line, a line for each; apart from `registry`, as most commands need no bodies."""

from server.features.chunks import command

COMMANDS = command.COMMANDS
# Of `ramet generate`.
add_prompt_options = command.add_prompt_options
read_prompt_options = command.read_prompt_options
