"""A generator for ChatLearn on an engine that ChatLearn does not know: CTranslate2."""
