"""English function words, which word swaps do not replace: they carry grammar, not meaning.

The list is in lower case and the comparison is exact, so a capitalised function word is not
excluded. The fragments are parts of contractions as tokenisers split them: `don 't`, `she 'll`.
"""

_ARTICLES_AND_DETERMINERS = "a an the this that these those each few more most other some such own"

_PRONOUNS = """
i me my myself we our ours ourselves you your yours yourself yourselves he him his himself
she her hers herself it its itself they them their theirs themselves
what which who whom you're you've you'll you'd she's it's that'll
"""

_VERBS = """
am is are was were be been being have has had having do does did doing can will just should
should've
"""

_PREPOSITIONS = """
of at by for with about against between into through during before after above below to from up
down in out on off over under
"""

_CONJUNCTIONS_AND_ADVERBS = """
and but if or because as until while again further then once here there when where why how
all any both no nor not only same so than too very now
"""

_NEGATIONS = """
don don't aren aren't couldn couldn't didn didn't doesn doesn't hadn hadn't hasn hasn't haven
haven't isn isn't mightn mightn't mustn mustn't needn needn't shan shan't shouldn shouldn't wasn
wasn't weren weren't won won't wouldn wouldn't ain ma
"""

_FRAGMENTS = "s t d ll m o re ve y"

STOP_WORDS = frozenset(
    " ".join(
        (
            _ARTICLES_AND_DETERMINERS,
            _PRONOUNS,
            _VERBS,
            _PREPOSITIONS,
            _CONJUNCTIONS_AND_ADVERBS,
            _NEGATIONS,
            _FRAGMENTS,
        )
    ).split()
)
