"""Questions as people put them, from frames and subjects: many, and none that a benchmark measures with."""

import numpy as np

_ABOUT_THINGS = (
    "What is {}?",
    "Explain {} in simple terms.",
    "Explain {} to a ten-year-old child.",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Why is {} important?",
    "Give me three facts about {}.",
    "Summarise what is known about {} in a few sentences.",
    "What are the advantages and disadvantages of {}?",
    "How does {} work?",
    "Describe {} in one paragraph.",
    "Write a short introduction to {}.",
    "What is the history of {}?",
    "List five things that everyone should know about {}.",
    "Write a dialogue between two friends about {}.",
    "What is the difference between {} and {}?",
    "Compare {} with {}.",
    "How is {} connected to {}?",
    "Write a headline and a short article about {}.",
    "What questions would you ask an expert on {}?",
)
_THINGS = (
    "photosynthesis", "gravity", "the water cycle", "electricity", "a rainbow", "the moon", "the solar system",
    "a volcano", "an earthquake", "the ocean", "the Amazon rainforest", "a desert", "climate change",
    "renewable energy", "a wind turbine", "a bicycle", "a steam engine", "a car engine", "an aeroplane", "a train",
    "the internet", "a computer virus", "artificial intelligence", "machine learning", "a database", "a compiler",
    "an operating system", "a search engine", "a smartphone", "a robot", "a telescope", "a microscope", "a clock",
    "money", "inflation", "a bank", "the stock market", "insurance", "a tax", "democracy", "a constitution",
    "the Roman Empire", "ancient Egypt", "the Middle Ages", "the French Revolution", "the Second World War",
    "the Silk Road", "the printing press", "the Olympic Games", "chess", "football", "music", "jazz", "a symphony",
    "painting", "photography", "the theatre", "a novel", "poetry", "a fairy tale", "a dragon", "an old castle",
    "a lost dog", "a cat that can talk", "a journey by night", "a hidden garden", "a train to nowhere",
    "a teacher and a pupil", "a brave little mouse", "a storm at sea", "a village in the mountains", "friendship",
    "courage", "happiness", "patience", "time", "memory", "a dream", "the human heart", "the brain", "the lungs",
    "a vaccine", "a vitamin", "healthy food", "bread", "cheese", "chocolate", "coffee", "tea", "honey", "a tree",
    "a flower", "a bee", "a whale", "an elephant", "a penguin", "a wolf", "an owl", "a fossil", "a dinosaur",
    "a diamond", "salt", "iron", "glass", "paper", "cotton", "a fraction", "a triangle", "the number pi",
    "probability", "algebra", "a map", "a compass", "a bridge", "a lighthouse", "a library", "a museum",
    "Germany", "Italy", "Japan", "Brazil", "Egypt", "India", "Canada", "London", "Rome", "Tokyo", "New York",
)  # fmt: skip
_ABOUT_ACTIONS = (
    "How do I {}?",
    "How can I {}?",
    "Give me some tips to {}.",
    "Give me a step by step guide to {}.",
    "What is the best way to {}?",
    "What do I need to {}?",
    "Suggest an easy way to {}.",
    "Write a polite email to a friend who wants to {}.",
    "Write a short letter about how hard it is to {}.",
    "My neighbour wants to {}. What should I tell her?",
    "Why do people {}?",
    "What mistakes should I avoid when I {}?",
)
_ACTIONS = (
    "learn a new language", "play the guitar", "cook pasta", "bake a cake", "make a vegetable soup", "grow tomatoes",
    "plan a holiday", "pack a suitcase", "save energy at home", "repair a bicycle", "paint a room", "clean a kitchen",
    "write a letter of application", "prepare for an interview", "give a speech", "write an essay",
    "read more books", "remember names", "learn for an exam", "solve a quadratic equation", "calculate a percentage",
    "find the area of a circle", "sort a list in Python", "write a function in Python", "read a file in Python",
    "count the words of a text in Python", "build a website", "make a budget", "buy a used car", "rent a flat",
    "train a puppy", "look after a cat", "start to run", "get fit", "stay calm", "make new friends",
    "organise a birthday party", "choose a present", "write a thank-you note", "take better photographs",
    "start a small company", "work from home", "manage my time", "stop putting things off", "wake up early",
    "drink more water", "eat less sugar", "teach a child to read", "tell a good joke", "write a song",
)  # fmt: skip

_WISHES = (
    "",
    "",
    "",
    " Keep it short.",
    " Use simple words.",
    " Give an example.",
    " Answer with a list.",
    " Be friendly.",
)


def ask(rng: np.random.Generator) -> str:
    """A question drawn from `rng`."""
    if rng.random() < 0.6:
        frame, subjects = str(rng.choice(_ABOUT_THINGS)), _THINGS
    else:
        frame, subjects = str(rng.choice(_ABOUT_ACTIONS)), _ACTIONS
    question = frame.format(*rng.choice(subjects, size=frame.count("{}"), replace=False))
    return question + str(rng.choice(_WISHES))
