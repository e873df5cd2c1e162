"""Make the training text of the tiny example model.

All text comes from the templates in this file, so nobody else holds rights in it; the same seed gives the same corpus. A
template is plain English with ``{slot}``, filled from the facts of the document (so a character keeps its name and pronoun),
and ``[a|b|c]``, a choice, which a following ``{=slot}`` stores for the rest of the document.

Choices are not uniform: equally likely alternatives would leave the model with near-ties, where a greedy continuation flips on
the last bit of a sum. One alternative is the favorite, and which one depends on the subject of the document, so that different
prompts lead to different text.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence


def entries(block: str) -> dict[str, str]:
    """Read ``key: text`` entries; indented lines continue an entry, which keeps long templates within the margin."""
    return dict(re.sub(r"\s+", " ", entry).split(": ", 1) for entry in re.split(r"\n(?=\S)", block.strip()))


GIRLS = "Mia Anna Lucy Sara Emma Rosa Lily Nora Ella Jane Amy Zoe".split()
BOYS = "Tom Ben Max Leo Sam Jack Tim Paul Adam Noah Peter Oscar".split()
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
TRAITS = "kind brave shy curious clever happy gentle lazy cheerful careful".split()
HOMES = ["in a small village", "in a white house", "in a little town by the sea", "near the woods", "in a big city"]
# Animal heroes: species, name, pronoun, home.
HEROES = [hero.split("/") for hero in (
    "cat/Milo/he/in a warm house", "dog/Rex/he/on a small farm", "fox/Ruby/she/in the forest",
    "rabbit/Clover/she/in a green field", "bear/Bruno/he/in a deep cave", "mouse/Pip/he/in an old barn",
    "duck/Daisy/she/by a quiet pond", "owl/Olga/she/in a hollow tree", "frog/Fred/he/in a muddy pond",
    "bird/Kiki/she/in a tall oak tree", "horse/Star/she/in a big stable",
)]
ENDINGS = ["From that day on, they were best friends.", "They lived happily ever after.",
           "And that was the end of a very good day.", "{N} never forgot that day.",
           "And they [laughed about it|told the story] for many years."]
PRONOUNS = {"he": ("him", "his", "himself"), "she": ("her", "her", "herself")}
# Animal facts: species -> kind, home, look, food, young, skill.
ANIMALS = entries("""
fox: wild animal / in the forest / red fur and a bushy tail / mice, berries, and eggs / cub / hear a mouse under snow
cat: small pet / in warm houses / soft fur and long whiskers / fish and meat / kitten / see very well in the dark
dog: friendly pet / with people / a wet nose and a wagging tail / meat and bones / puppy / follow a smell for miles
bear: big animal / in the mountains / brown fur and strong claws / fish and honey / cub / sleep through the whole winter
owl: bird of the night / in old trees / round eyes and quiet wings / mice and insects / owlet / turn its head backward
frog: green animal / near ponds and rivers / smooth skin and long legs / flies and worms / tadpole / jump very far
horse: strong animal / on farms / a long mane and four fast legs / grass and apples / foal / sleep while it is standing
whale: huge animal / in the sea / smooth gray skin / tiny fish and krill / calf / hold its breath for an hour
elephant: giant animal / in hot countries / big ears and a long trunk / leaves and fruit / calf / remember its friends
mouse: tiny animal / in fields and barns / round ears and a thin tail / grain and cheese / pup / hide in a small hole
""")
# Fact sheets: the first sentence always stands, the others come in order and may be left out.
FACTS = entries("""
sea: The sea is full of salt water. / Many fish and whales live there. / In the wind, the waves grow high.
moon: The moon is a big ball of rock that moves around the earth. / It has no air and no water. / It shines because the
  sun lights it up. / Sometimes it looks round, and sometimes it looks like a thin boat.
sun: The sun is a star. / It gives us light. / Without it, no plant could grow. / It rises in the east.
forest: The forest is the home of many trees and animals. / In spring, young leaves open on every branch. / Deer, foxes,
  and owls hide there. / If you are quiet, you can hear a woodpecker.
winter: Winter is the coldest season of the year. / The days are short. / Snow covers the roofs and the fields.
summer: Summer is the warmest season of the year. / The days are long. / Children swim in the lake and eat ice cream.
rain: Rain falls from gray clouds. / When the sun shines through it, you can see a rainbow. / Frogs and ducks like it.
farm: The farm lies at the end of a dusty road. / Cows, pigs, and chickens live there. / The farmer gets up early.
""")
# How-tos: task -> needs, steps, closing sentence.
HOWTOS = entries("""
make soup: two carrots, one onion, and a little salt / wash the carrots and cut them / fry the onion / add six cups of
  water / let it cook for twenty minutes / stir it well / Eat it while it is hot.
bake bread: flour, water, yeast, and salt / mix the flour with the yeast / add warm water to make a soft dough / let it
  rest for an hour / put it into the hot oven / wait until the crust is brown / Fresh bread tastes good.
make pancakes: two eggs, some milk, and some flour / break the eggs into a bowl / stir in the milk and the flour / melt
  butter in a pan / pour in a little of the batter / turn the pancake when it is golden / Serve it with jam.
make tea: water, a tea bag, and some honey / boil the water in a kettle / put the tea bag into a cup / pour the water
  over it / wait for three minutes / add the honey / Be careful, because the tea is very hot.
plant a tree: a spade, a young tree, and a bucket of water / dig a deep hole / put the roots into it / fill the hole
  with good earth / press it down with your feet / pour the water around the stem / Soon you can sit in its shade.
wash a dog: a tub, warm water, soap, and a towel / fill the tub with water / lift the dog in / rub the soap into its fur
  / rinse it until the water is clear / dry it with the towel / Step back, because it will shake itself.
""")
# Little plots. N is the hero (he, him, his), F the friend (fhe, fhim, fhis).
PLOTS = entries("""
lost: [One day|One morning], {N} lost {his} [red ball|blue hat|favorite book|little bell|warm scarf]{=thing}. {He}
  looked [under the bed|behind the door|in the garden|near the well], but it was not there. Then {F} came by and asked,
  "Why do you look so sad?" "I cannot find my {thing}," said {N}. "Let us look for it together," said {F}. They searched
  [all morning|for a long time] and found the {thing} [under a bush|in an old basket|beside the river]. {N} was so happy
  that {he} [jumped up and down|gave {F} a big hug].
hurt: [One day|One morning], {N} heard a small sound in the [grass|bushes|leaves|garden]. It was a little
  [bird|squirrel|lamb|sparrow]{=pet} with a hurt leg. "Poor {pet}!" said {N}. "I will help you." {He} made a soft bed of
  [straw|moss|old clothes|wool]. Every day, {he} brought it [fresh water|some bread|seeds and berries|warm milk]. {F}
  helped {him} to take care of it. After [a week|many days|three days], the {pet} was strong again.
gift: It was the birthday of {F}, and {N} wanted to give {fhim} something [special|nice|beautiful]. But {he} had no
  money. Then {he} had [a good idea|a wonderful plan|an idea]. {He} went to the [meadow|beach|forest|hill] and picked up
  [yellow flowers|shiny shells|round stones|colored feathers]{=gift}. At home, {he} used the {gift} to make [a crown|a
  necklace|a picture|a small box]. When {F} saw it, {fhe} [smiled|laughed with joy]. "This is the best present of all,"
  {fhe} said.
storm: One night, there was a [loud|terrible|wild|great] storm. The wind [howled|blew hard|shook the windows], and the
  rain [beat on the roof|fell like a river|did not stop]. {N} was afraid and could not sleep. {He} hid [under the
  blanket|in a corner|behind a chair]. Then there was a knock at the door. It was {F}, who was [wet and cold|shaking
  with fear|just as afraid]. "May I stay with you?" asked {F}. "Of course," said {N}. They [told stories|sang
  songs|drank hot milk|played a game] until the storm was over.
learn: {N} wanted to learn how to [swim|whistle|dance|climb|skate]{=skill}. The first time, {he} [fell down|gave up|did
  everything wrong]. "I will never learn to {skill}," {he} said. "I can help you," said {F}. They practiced every
  [day|morning|evening|afternoon]. At first it was hard, but {he} did not [stop|give up|lose heart]. After [a week|ten
  days|a month], {N} could {skill} better than anyone. "Thank you so much," said {N}.
share: [One day|One morning], {N} had a [big cake|basket of apples|bag of nuts|bowl of cherries|loaf of bread]{=food}.
  {He} wanted to eat it all [alone|by {himself}]. Then {he} saw {F}, who had nothing to eat. {F} looked very
  [hungry|tired|thin]. {N} thought about it for a moment. "Come and sit with me," {he} said. "There is enough for two."
  They shared the {food} [in the shade|under the tree|on the grass|on a bench]. The next day, {F} brought [sweet
  pears|some honey|fresh milk|warm cookies] to say thank you.
map: [One day|One morning], {N} found an old map [in a bottle|under a stone|in the attic|behind a picture]. It showed
  the way to a [treasure|secret garden|hidden cave|lost castle]{=goal}. {N} and {F} walked [over the hill|through the
  dark wood|along the river|across the bridge] until they were tired. At [noon|sunset|last], they came to a [small
  door|huge rock|broken wall|dry well]. Behind it, they found the {goal}. It was full of [gold coins|roses|old
  toys|shining stones]. "We did it!" cried {F}.
seed: {F} gave {N} a tiny [brown|black|white|round] seed. "Plant it and wait," said {F}. {N} put it into the ground and
  watered it every [day|morning|evening]. For a long time, nothing happened. {N} became [impatient|sad|a little angry],
  but {he} kept on watering. Then, one [spring|warm|bright|quiet] morning, a green leaf came out of the earth. It grew
  and grew until it was a [tall sunflower|fine apple tree|huge pumpkin|red rose].
truth: {N} was playing in the [kitchen|living room|hall]. By accident, {he} broke the [blue vase|big lamp|white cup|old
  clock]{=thing} of {F}. {N} was afraid and hid the pieces [under the carpet|in a box|behind the stove]. In the evening,
  {he} told {F} what had happened. "I am sorry about the {thing}," {he} said. {F} was [quiet|angry|sad] for a moment and
  then smiled. "Thank you for telling me the truth," said {F}.
noise: In the middle of the night, {N} heard a strange noise. It came from the [cellar|attic|barn|kitchen]{=room}. "Is
  it a [ghost|thief|monster|dragon]?" thought {N}. {He} took a [candle|lamp|broom|big spoon] and went slowly to the
  {room}. {He} opened the door and looked inside. There was {F}, who was eating [cheese|cold pie|plum jam|a sausage]!
  They laughed, ate the rest together, and went back to bed.
star: Every night, {N} looked at the [stars|sky|moon]. {He} wished for [a true friend|a little brother|an adventure|a
  boat]{=wish}. One night, a star fell [into the lake|behind the hill|into the garden|on the roof]. {N} ran outside and
  found {F} there, who had seen it too. They talked [until the morning|about the sky|for hours] and laughed a lot. "I
  wished for {wish}," said {N}. "Sometimes wishes come true in a different way," said {F}.
walk: {N} went to the [park|lake|market|library] with {F}. They saw [a clown|a white swan|a singer|two dogs] and
  [laughed|waved|stood still]. {N} bought [ice cream|a kite|a balloon|hot bread] for {F}. "I like it here," said {F}.
  "Let us come back tomorrow."
""")
LETTERS = entries("""
thanks: Thank you for the [lovely book|warm socks|big box of pencils|beautiful card]. I [like it very
  much|was so happy when I opened it|show it to everyone]. My [brother|sister|mother|father] wants one too.
trip: We are at the [sea|lake|farm of my uncle|mountains] now. Every morning, we [go for a swim|walk for an hour|feed
  the chickens]. Yesterday, I saw a [dolphin|deer|big snake|white horse]!
invite: I will have a party on [Saturday|Sunday|Friday]. We will have [cake|music|games and pizza|magic]!
sick: I am sorry that you are sick. I hope you feel better soon. Please [sleep well|stay in bed|read a good book].
pet: We have a new [puppy|kitten|parrot|rabbit] at home. It is [very small|always hungry|a little wild]. When it sees
  me, it [runs to me|makes a funny noise|jumps on my lap].
""")
# Dialogues and rhymes; a slash is a line break.
CHATS = entries("""
0: "Hello, {F}," said {N}. / "Hello, {N}," said {F}. "Where are you going?" / "I am going to the [market to buy
  bread|library to return a book|park to feed the ducks]." / "May I come with you?" / "Of course," said {N}.
1: "What are you doing?" asked {F}. / "I am [painting a picture|building a boat|reading a book]," said {N}. / "Is it
  hard?" / "[Not at all|A little|Only at the beginning]," said {N}. "Do you want to try?" / "Yes!"
2: {N}: Hello, {F}! / {F}: Hi, {N}! What is the weather like today? / {N}: It is [sunny|raining|snowing|very windy]. /
  {F}: Then we should [go to the beach|stay at home|build a snowman|fly a kite]. / {N}: [Good idea|All right]!
""")
RHYMES = entries("""
night: The moon is up, the day is done, / Good night, good night, you golden sun. / The stars are small, the sky is
  deep, / The birds and bees have gone to sleep.
rain: The rain comes down on roof and tree, / It sings a little song to me. / I jump in puddles, one, two, three, / As
  wet and glad as I can be.
cat: My little cat is soft and gray, / She likes to sleep, she likes to play. / She drinks her milk, she has her chair,
  / And when I call, she is not there.
""")


def an(noun: str) -> str:
    """Put the indefinite article before a noun."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


class Teller:
    """Fills the templates of one document, with favorites that depend on the subject `key`."""

    def __init__(self, rng: random.Random, key: str = "") -> None:
        self.rng, self.voice = rng, zlib.crc32(key.encode()) % 5
        self.slots: dict[str, str] = {}

    def pick(self, options: Sequence[str], decay: float = 0.5) -> str:
        """Choose with geometric weights; the voice decides which option is the favorite (see the module text)."""
        first = zlib.crc32(f"{self.voice}{'|'.join(options)}".encode()) % len(options)
        return self.rng.choices(options, [decay ** ((i - first) % len(options)) for i in range(len(options))])[0]

    def cast(self, name: str, pronoun: str, prefix: str = "") -> None:
        """Set the slots of a character: N he him his, or F fhe fhim fhis with the prefix ``f``."""
        self.slots["F" if prefix else "N"] = name
        for slot, word in zip(("he", "him", "his", "himself"), (pronoun, *PRONOUNS[pronoun]), strict=True):
            self.slots |= {prefix + slot: word, prefix + slot.capitalize(): word.capitalize()}

    def person(self, prefix: str = "") -> str:
        """Cast a girl or a boy who is not in the document yet, and return "girl" or "boy"."""
        kind = self.pick(["girl", "boy"], 0.8)
        names = [name for name in (GIRLS if kind == "girl" else BOYS) if name != self.slots.get("N")]
        self.cast(self.pick(names, 0.85), "she" if kind == "girl" else "he", prefix)
        return kind

    def say(self, template: str) -> str:
        """Fill one template. Slots inside a choice are filled first, so that a stored choice is plain text."""

        def choose(match: re.Match[str]) -> str:
            text = self.pick(match[1].split("|"))
            if match[2]:
                self.slots[match[2]] = text
            return text

        text = re.sub(r"\{(\w+)\}", lambda m: self.slots.get(m[1], m[0]), template)
        text = re.sub(r"\[([^\[\]]*)\](?:\{=(\w+)\})?", choose, text)
        text = re.sub(r"\{(\w+)\}", lambda m: self.slots[m[1]], text)
        return re.sub(r"(^|[.!?:] |\n)([a-z])", lambda m: m[1] + m[2].upper(), text)


def story(rng: random.Random) -> str:
    """A hero, a friend, one plot and sometimes an ending."""
    teller, trait = Teller(rng), Teller(rng).pick(TRAITS, 0.85)
    kind, home, nameless = teller.person(), teller.pick(HOMES, 0.85), False
    if rng.random() < 0.45:
        kind, name, pronoun, home = rng.choices(HEROES, [0.9**i for i in range(len(HEROES))])[0]
        nameless = rng.random() < 0.4
        teller.cast(f"the {kind}" if nameless else name, pronoun)
    teller.voice = Teller(rng, teller.slots["N"]).voice
    starts = [f"Once upon a time, there was a [little|young] {kind} named {{N}}. {{He}} lived {home}.",
              f"{{N}} was {an(trait)} {kind} who lived {home}.",
              f"There was once {an(trait)} {kind} named {{N}}. {{He}} lived {home}.",
              f"{home}, there lived {an(trait)} {kind} named {{N}}."]
    if nameless:
        starts = [f"{{N}} lived {home}. {{He}} was very {trait}.", f"{{N}} was very {trait} and lived {home}."]
    start = rng.choices(starts, [0.75**i for i in range(len(starts))])[0] + " {His} best friend was {F}."
    teller.person("f")
    if rng.random() < 0.25:
        relative = teller.pick(["grandmother", "grandfather", "mother", "uncle"])
        teller.cast(f"{teller.slots['his']} {relative}", "she" if "mother" in relative else "he", "f")
        start = start.replace("{His} best friend was {F}", "[{F} lived next door|{He} loved {F} very much]")
    ending = " " + teller.pick(ENDINGS) if rng.random() < 0.6 else ""
    start = "" if rng.random() < 0.2 else start + " "  # A plain beginning, for prompts like "Peter went to".
    return teller.say(f"{start}{PLOTS[teller.pick(list(PLOTS), 0.85)]}{ending}")


def facts(rng: random.Random) -> str:
    """Facts about an animal or a topic, as a text, a question or a riddle."""
    if rng.random() < 0.3:
        first, *rest = FACTS[rng.choice(list(FACTS))].split(" / ")
        return " ".join([first, *(s for s in rest if rng.random() < 0.75)])
    species = rng.choice(list(ANIMALS))
    kind, home, look, food, young, skill = ANIMALS[species].split(" / ")
    one = an(species)
    form = rng.choices(("text", "question", "riddle"), (5, 2, 2))[0]
    if form == "question":
        return Teller(rng).say(rng.choice([f"Question: What does {one} eat?\nAnswer: {one} eats {food}.",
                                           f"Question: Where does {one} live?\nAnswer: {one} lives {home}."]))
    if form == "riddle":
        return f"I have {look}. I live {home}. I eat {food}. I can {skill}. What am I? I am {one}."
    more = [f"It has {look}.", f"It eats {food}.", f"A young {species} is called {an(young)}.",
            f"{one.capitalize()} can {skill}."]
    subject = rng.choices([f"The {species}", one.capitalize()], (3, 2))[0]
    return " ".join([f"{subject} is {an(kind)} that lives {home}.", *(s for s in more if rng.random() < 0.8)])


def howto(rng: random.Random) -> str:
    """A recipe or another task, step by step."""
    task = rng.choice(list(HOWTOS))
    needs, *steps, end = HOWTOS[task].split(" / ")
    words = ("First,", "Then", "Next,", "After that,", "At last,")
    middle = " ".join(f"{word} {step}." for word, step in zip(words, steps, strict=True))
    return f"To {task}, you need {needs}. {middle} {end}"


def letter(rng: random.Random) -> str:
    """A short letter; who it goes to decides what it is likely to be about."""
    teller = Teller(rng)
    teller.person()
    teller.person("f")
    teller.voice = Teller(rng, teller.slots["N"]).voice
    body = LETTERS[teller.pick(list(LETTERS))]
    return teller.say(f"Dear {{N}},\n\n{body}\n\n[Your friend|With love|Best wishes],\n{{F}}")


def small_talk(rng: random.Random) -> str:
    """A dialogue, a rhyme or a little counting text."""
    teller = Teller(rng)
    teller.person()
    teller.person("f")
    form = rng.choices(("chat", "rhyme", "sum", "count"), (4, 2, 3, 1))[0]
    if form in ("chat", "rhyme"):
        return teller.say(rng.choice(list((CHATS if form == "chat" else RHYMES).values())).replace(" / ", "\n"))
    a, b, thing = rng.randint(2, 6), rng.randint(2, 6), teller.pick(["apples", "books", "coins", "flowers"])
    if form == "sum":
        return teller.say(f"{{N}} has {NUMBERS[a]} {thing}. {{F}} gives {{him}} {NUMBERS[b]} more. "
                          f"Now {{N}} has {NUMBERS[a + b]} {thing}.")
    return f"Let us count to {NUMBERS[a + b]}. One, {', '.join(NUMBERS[2 : a + b + 1])}!"


def documents(count: int, seed: int = 0) -> list[str]:
    """Make `count` documents; the same arguments always give the same list."""
    rng = random.Random(seed)
    return [style(rng) for style in rng.choices([story, facts, howto, letter, small_talk], (60, 16, 6, 8, 10), k=count)]


if __name__ == "__main__":
    print("\n\n".join(documents(10)))
