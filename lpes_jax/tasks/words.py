"""Everyday English words for generated prompts: our own list; RULER uses the package wonderwords.

Lower case; no word occurs twice in the three lists together.
"""

ADJECTIVES = tuple(
    """able ample amused ancient angry antique anxious awake aware bare basic big bitter black blank blue blunt
    bold brave brief bright brisk broad broken brown busy calm careful cheap cheerful chief clean clear
    clever close cloudy cold common cool coral correct cosy crisp cruel curious curly cute damp dark dear
    deep deft dense dim direct dizzy domestic double dry dull dusty eager early easy elder elegant empty
    equal even exact extra faint fair faithful famous fancy far fast fierce final fine firm fit flat fluffy
    fond formal frail free fresh frosty frozen full funny furry fuzzy gentle giant glad glossy golden good
    grand grassy grave gray great green grumpy handy happy hardy harsh hasty hazy heavy hidden hollow honest
    hot huge humble hungry icy ideal idle inner ivory jolly joyful juicy keen kind large late lazy lean
    light likely little lively local lonely long loose loud lovely low loyal lucky major mellow merry mighty
    mild minor misty modern modest moist muddy narrow native neat new nice nimble noble noisy normal novel
    odd old open orange outer pale patient perfect plain playful pleasant plump polite poor precise pretty
    prime private proper proud public pure purple quick quiet rapid rare raw ready real red regular rich
    ripe rosy rough round royal rude rural rusty sad safe salty sandy secret serious shaggy shallow sharp
    shiny short shy silent silky silver simple sleepy slim slow small smart smooth snowy sober soft solid
    sour spare speedy spicy steady steep stern sticky stiff stony stout strange strict strong sturdy sudden
    sunny sweet swift tall tame tender tense thick thin thirsty tidy tight tiny tired tough tricky true
    upper urban useful usual vague vain vast vivid warm wary weak wealthy weary wet white whole wide wild
    windy wise witty wooden woolly worthy young zany""".split()
)
NOUNS = tuple(
    """acorn actor airport alley almond anchor ankle answer ant apple apron arch arrow artist aunt autumn axle baby
    badge badger bag baker balcony ball balloon bamboo banana band bank barber bark barn barrel basin basket
    bat bath battery beach bead beak beam bean bear beard beaver bed bee beetle bell belt bench berry
    bicycle bird biscuit blanket blossom board boat bolt bone bonnet book boot border bottle boulder bowl
    box branch brass bread breeze brick bridge broom brother brush bucket buckle bud bulb bunny bus bush
    butcher butter button cabin cable cactus cake calendar calf camel camera camp canal candle cannon canoe
    canvas cap captain car card cargo carpet carrot cart castle cat cattle cave cedar ceiling cellar chain
    chair chalk channel chapel cheese cherry chess chest chicken chimney chin church cinema circle circus
    city clay clerk cliff clock cloth cloud clover coach coal coast coat cobbler coconut coffee coin collar
    colt comb comet compass cook copper copy cork corn corner cottage cotton couch cousin cow crab cradle
    crane crate crayon cream creek crew cricket crow crown crust cup cupboard curtain cushion custard daisy
    dam dancer daughter dawn deck deer desert desk diamond dinner dish ditch doctor dog doll dolphin donkey
    door dove dragon drawer dream dress drill driver drum duck dune dust eagle ear earth echo edge eel egg
    elbow elephant elm engine envelope evening eye fabric factory falcon farm farmer feather fence fern
    ferry fiddle field fig film finch finger fire fish flag flame flask fleet floor flour flower flute foal
    fog folder foot forest fork fortress fountain fox frame friend frog frost fruit funnel galaxy gallery
    garage garden garlic garment gate gecko ghost gift ginger giraffe girl glacier glass globe glove goat
    goblet goose grain grape grass gravel grove guard guest guitar gull gym hall ham hammer hamster hand
    handle harbour hare harp harvest hat hawk hay hazel head heart hedge helmet hen herb hero heron hill
    hinge hive holiday honey hood hook hoop horn horse hospital hotel hour house igloo inch ink inn insect
    iron island ivy jacket jam jar jelly jewel jockey journal jug juice jungle kettle key king kitchen kite
    kitten knee knife knight knot label lace ladder lady lake lamb lamp land lane lantern lark lawn lawyer
    leaf leather lemon lens leopard lesson letter lettuce library lily lime lion lizard llama lobster lock
    locket log loom lunch lynx magnet magpie maid mail mango mantle map maple marble market mask mast match
    meadow meal medal melon mermaid metal meteor mill miller mine mint mirror mitten mole monkey month moon
    moose mosaic moss moth motor mountain mouse mouth mug mule museum mushroom music nail napkin neck
    necklace needle nephew nest net nettle newt night noodle north nose notebook nurse nut oak oar oasis
    ocean office olive onion opera orchard orchid organ ostrich otter oven owl owner ox oyster paddle page
    paint palace palm pan panda panel paper parade parcel park parrot parsley pasta pastry path peach
    peacock pear pearl pebble pedal pen pencil penguin pepper perch piano picnic pie pier pig pigeon pillow
    pilot pin pine pipe pirate pitcher planet plank plant plate plough plum pocket poem poet pond pony poppy
    porch port porter postcard pot potato potter powder prince prism puddle pulley pump pumpkin puppet puppy
    purse puzzle quail quarry quartz queen quill quilt rabbit radio radish raft rail rain rake ram raven
    reed reef ribbon rice rider ring river road robin rock rocket roof room root rope rose rudder rug ruler
    sack saddle sail sailor salad salmon salt sand sandal sauce saucer sausage scarf school scissors scout
    screen screw sea seal season seed shadow shark shed sheep shelf shell shepherd ship shirt shoe shop
    shore shovel shrimp sister skate skirt sky sled sleeve slipper smith smoke snail snake snow soap sock
    sofa soil soldier son song soup south spade sparrow spear sphere spider spinach spoon spring spruce
    squirrel stable stage stair stamp star statue steam steel stem stick stone stool storm stove straw
    stream street string studio sugar suit summer sun swallow swan sweater swing sword syrup table tailor
    tank tea teacher teapot temple tent thimble thistle thorn thread throne thumb thunder ticket tide tiger
    tile timber toad toast tomato tongue tool tooth torch tortoise towel tower town toy tractor trail train
    tray tree trophy trout truck trumpet trunk tulip tunnel turkey turnip turtle twig umbrella uncle valley
    vase vault vest village vine violet violin visitor voice volcano voyage wagon waiter wall wallet walnut
    walrus warden wave wax weasel weaver web week well whale wharf wheat wheel whistle willow wind window
    wing winter wire wolf wood wool worm wreath wren wrist writer yacht yard yarn year zebra zipper""".split()
)
VERBS = tuple(
    """accept add admire admit advise agree aim allow announce appear argue arrange arrive ask attach attend avoid
    bake balance bathe become beg begin behave believe belong bend blame bless blink blow boil borrow bounce
    bow breathe bring build burn bury buy call carry carve catch change charge chase check cheer chew choose
    chop clap climb collect come compare complain connect consider contain continue cost cough count cover
    crash crawl cross cry cure cut dance dare decide decorate deliver depend describe deserve detect develop
    dig dine divide dive draw drift drink drive drop earn eat employ encourage end enjoy enter escape
    examine excite exist expand expect explain explore extend fade fail fall fasten fear feed feel fetch
    fill find finish fix float flow fly fold follow forget forgive gather gaze get give glance glow glue go
    grab greet grip grow guess guide happen hatch heal hear heat help hide hit hold hope hug hum hunt hurry
    identify imagine improve include increase inform invent invite join joke judge juggle jump keep kick
    kneel knit knock know laugh launch lead learn leave lend lift listen live look lose love make manage
    march mark marry measure meet melt memorize mend mention mix move multiply murmur need notice obey
    observe obtain occur offer order own pack part pass paste pause pay perform permit persuade pick plan
    play plead please point polish possess pour practise praise pray prefer prepare present press pretend
    prevent print produce promise protect prove provide pull push put raise reach read receive recite
    recognise record reduce refuse rejoice relax release rely remain remember remind remove repair repeat
    replace reply report rescue rest return reveal rinse rise roam roll rub run rush save say scatter scold
    scrape scream search see seek seem sell send sense separate serve settle sew shake shape share shave
    shine shout show shrink shut sigh sing sink sip sit ski sleep slide slip smell smile sneeze sniff solve
    sort sound speak spell spend spill spin split spread sprinkle squeeze stand stare start stay steer step
    stir stop stretch stroll study succeed suggest supply support surprise surround swim take talk taste
    teach tear tell thank think throw tickle tie touch trade travel tremble trust try tug tumble turn twist
    type understand unite unlock unpack use vanish vary visit wait wake walk wander want warn wash waste
    watch wear weave weigh welcome whisper win wink wipe wish wonder work worry wrap wrestle write yawn yell
    zoom""".split()
)
