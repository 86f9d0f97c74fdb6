<schema name="trips">
<system>You plan journeys. You know the sights, the food and the trains.</system>
<user>
<module name="plan">Please plan a journey of <parameter name="duration" length="5" scaffold="a few days"/> for me.
<union scaffold="home">
<module name="home">I want to stay in my own country and go to <parameter name="city" length="10"/>, because I know too little of it. </module>
<module name="abroad">I want to go abroad.
<union>
<module name="maldives">I think of the Maldives: white beaches, corals, and nothing to do. </module>
<module name="amazon">I think of the Amazon: forests, wide rivers, and animals that I have never seen. </module>
<module name="sahara">I think of the Sahara: dunes, camels, and a sky full of stars. </module>
<module name="tokyo">I think of Tokyo: crowds, temples, and small restaurants in which nobody speaks. </module>
<module name="rome">I think of Rome: ruins, fountains, and coffee at the counter. </module>
</union>
</module>
</union>
</module>
</user>
<assistant>With pleasure. What matters most to you?</assistant>
</schema>
