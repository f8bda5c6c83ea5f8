//! What a format is: a name, how its sources are laid out, and a reader of its documents.

use std::fmt;

use forebay_wire::{Trajectory, Violation};

use crate::options::Options;

/// An import format.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// The name of the format, as `--format` and `POST /imports/{format}` have it.
    pub name: &'static str,
    /// What the format is, in half a sentence.
    pub about: &'static str,
    /// How a source of the format is laid out.
    pub layout: Layout,
    /// Makes a reader for one source.
    pub reader: fn(&Options) -> Box<dyn Reader>,
}

/// How a source is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Each line is a document.
    Lines,
    /// Each line is a document if the first line is a whole JSON value. Otherwise the whole source is one document.
    LinesOrDocument,
}

/// Reads the documents of one source, in their order.
///
/// Most formats have a rollout in each document and use `each`. A format whose rollouts span several documents keeps
/// the incomplete rollout, and adds its record when a later document or [`end`](Self::end) completes it.
pub trait Reader: Send {
    /// Reads the next document, and adds the records that are complete now.
    fn read(&mut self, document: &Document<'_>, found: &mut Vec<Record>);

    /// Adds the records that are left at the end of the source.
    fn end(&mut self, found: &mut Vec<Record>) {
        let _ = found;
    }
}

/// One document of a source.
#[derive(Clone, Copy, Debug)]
pub struct Document<'d> {
    /// The line on which the document begins, counted from 1.
    pub line: u64,
    /// Its bytes, without the line end.
    pub text: &'d [u8],
}

/// What became of a document, or of the documents of a rollout.
#[derive(Debug)]
pub struct Record {
    /// The line on which the document begins, counted from 1.
    pub line: u64,
    /// What the document has, or what is wrong in it: at least one violation, with pointers into the document.
    pub outcome: Result<Imported, Vec<Violation>>,
}

/// What a document has.
#[derive(Debug, Default)]
pub struct Imported {
    /// Its rollouts. Each of them has a `rollout_id`, so that a second import is recognised.
    pub trajectories: Vec<Trajectory>,
    /// What was left out, and how often.
    pub notes: Vec<(Note, u64)>,
}

impl Imported {
    /// Counts something that was left out.
    pub(crate) fn note(&mut self, note: Note, times: u64) {
        match self.notes.iter_mut().find(|(known, _)| *known == note) {
            Some((_, count)) => *count += times,
            None if times > 0 => self.notes.push((note, times)),
            None => {}
        }
    }
}

/// Something in a document that is imported without being trained, in another form, or not at all. Reports count it by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Note {
    /// A call has sampled ids but no prompt ids. A token may only be trained behind the ids that it was sampled behind.
    CallWithoutPrompt,
    /// One step summarizes several calls, so its ids are not those of one call.
    AggregatedCalls,
    /// A step was copied from another document for context.
    CopiedContext,
    /// A trace says that its tokens train nothing.
    NotTrainable,
    /// Free-form data was too large for the metadata of a rollout.
    ExtraLeftOut,
    /// The definitions of tools were too large for the metadata of a rollout.
    ToolsLeftOut,
    /// A document has halves of surrogate pairs. Each of them became U+FFFD, because it is no character.
    SurrogateReplaced,
}

impl Note {
    /// The stable name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CallWithoutPrompt => "call-without-prompt",
            Self::AggregatedCalls => "aggregated-calls",
            Self::CopiedContext => "copied-context",
            Self::NotTrainable => "not-trainable",
            Self::ExtraLeftOut => "extra-left-out",
            Self::ToolsLeftOut => "tools-left-out",
            Self::SurrogateReplaced => "surrogate-replaced",
        }
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Converts one document without regard to the others.
pub(crate) type Convert = fn(&Document<'_>, &Options) -> Result<Imported, Vec<Violation>>;

/// A reader of a format in which every document stands alone.
pub(crate) fn each(options: &Options, convert: Convert) -> Box<dyn Reader> {
    struct Each {
        options: Options,
        convert: Convert,
    }

    impl Reader for Each {
        fn read(&mut self, document: &Document<'_>, found: &mut Vec<Record>) {
            found.push(Record { line: document.line, outcome: (self.convert)(document, &self.options) });
        }
    }

    Box::new(Each { options: options.clone(), convert })
}
