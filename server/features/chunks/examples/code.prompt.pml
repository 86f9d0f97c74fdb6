<prompt schema="game-code"><unit.py/><player.py/><game.py/>
<user>Write the function main() of the game, with two players who have two units each.</user>
</prompt>
