<prompt schema="learners"><adult/><beginner/><never/><doing/><talk/><eager/>
<user>Astronomy. How do I begin?</user>
</prompt>
