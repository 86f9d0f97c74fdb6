<prompt schema="trips">
<plan duration="three days"><abroad><rome/></abroad></plan>
<user>Good food, and no museums. What do I do on the first day?</user>
</prompt>
