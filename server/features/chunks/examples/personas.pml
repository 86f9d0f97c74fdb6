<schema name="learners">
<system>You recommend how somebody should study, in three short sentences.</system>
<user>This is who I am.
<union scaffold="school">
<module name="school">I go to school, and I have lessons in the morning and homework in the afternoon. </module>
<module name="college">I am at college, and I plan my weeks myself, between lectures and a part-time job. </module>
<module name="adult">I left school long ago, and I study in the evenings, when my children sleep. </module>
</union>
<union scaffold="beginner">
<module name="beginner">I am a beginner: the words of the subject are new to me, and I need small steps. </module>
<module name="advanced">I know the subject well; what I lack are hard problems and somebody who checks my answers. </module>
<module name="expert">I am an expert who wants to know what has changed in the last two years. </module>
</union>
<union scaffold="recent">
<module name="recent">I worked on it last week, so that I remember most of it. </module>
<module name="year">I last worked on it a year ago, and I have forgotten the details. </module>
<module name="never">I have never worked on it. </module>
</union>
<union scaffold="visual">
<module name="visual">I learn best from pictures, diagrams and colours. </module>
<module name="listening">I learn best when I listen, for example to lectures while I walk. </module>
<module name="doing">I learn best when I do things with my hands. </module>
<module name="reading">I learn best from books, with a pencil. </module>
</union>
<union scaffold="test">
<module name="test">In the end there will be a test with several answers to choose from. </module>
<module name="essay">In the end I have to write an essay. </module>
<module name="talk">In the end I have to give a talk. </module>
</union>
<union scaffold="eager">
<module name="eager">I look forward to it.</module>
<module name="reluctant">To be honest, I would rather do something else.</module>
</union>
</user>
<assistant>Thank you. What do you want to study?</assistant>
</schema>
