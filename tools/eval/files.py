"""The records of every image set that is read here, and its files of results. Standard library only, but for parquet.

records.py: what a record is; formats.py, rows.py: the kinds of files; caption_files.py, question_files.py: their readers;
submissions.py: results.
"""

from caption_files import read_captions, with_objects
from question_files import read_documents, read_questions
from records import CAPTIONS, CHARTQA, DOCUMENTS, QUESTIONS, TEXTVQA, VIZWIZ, Item, Split, within
from submissions import answer_results, caption_results, read_answer_results, read_caption_results, texts_of

__all__ = ["CAPTIONS", "CHARTQA", "DOCUMENTS", "QUESTIONS", "TEXTVQA", "VIZWIZ", "Item", "Split", "answer_results",
           "caption_results", "read_answer_results", "read_caption_results", "read_captions", "read_documents",
           "read_questions", "texts_of", "with_objects", "within"]  # fmt: skip
