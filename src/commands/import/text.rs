//! Reports as text and as JSON, and the progress on a terminal.

use std::{
    fmt::Write as _,
    io::{IsTerminal as _, Write as _},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use forebay_wire::ImportReport;

use super::source::Position;
use crate::commands::text::shown;

/// The shortest time between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// A report as one line of JSON.
pub(super) fn json(report: &ImportReport) -> String {
    serde_json::to_string(report).expect("a report is plain data") + "\n"
}

/// A report for people.
pub(super) fn report(report: &ImportReport) -> String {
    let ImportReport { documents, rollouts, stored, duplicates, refused, .. } = report;
    let file = report.file.as_deref().unwrap_or("-");
    let mut text = format!(
        "{file}: {} with {}: {stored} stored, {duplicates} already there, {refused} refused\n",
        counted(*documents, "document"),
        counted(*rollouts, "rollout"),
    );
    let verdicts = report.verdicts;
    let named =
        [("kept", verdicts.kept), ("masked", verdicts.masked), ("dropped", verdicts.dropped), ("late", verdicts.late)];
    line(&mut text, "verdicts", named.into_iter().filter(|(_, count)| *count > 0));
    line(&mut text, "reasons", report.reasons.iter().map(|(reason, count)| (reason.as_str(), *count)));
    line(&mut text, "left out", report.notes.iter().map(|(note, count)| (note.as_str(), *count)));
    for refusal in &report.refusals {
        let rollout = refusal.rollout_id.as_ref().map(|id| format!(" ({id})")).unwrap_or_default();
        let pointer = if refusal.pointer.is_empty() { String::new() } else { format!(" {}", refusal.pointer) };
        // Ids and texts of the file are in it, and a terminal obeys some characters.
        let what = shown(&format!("{rollout}{pointer}: {}: {}", refusal.kind, refusal.detail));
        let _ = writeln!(text, "  line {}{what}", refusal.line);
    }
    if report.refused > report.refusals.len() as u64 {
        let _ = writeln!(text, "  and more: only the first {} are listed", report.refusals.len());
    }
    if verdicts.late > 0 {
        text.push_str("  late: the group was decided before; name the size of the groups with --group-size\n");
    }
    if report.refusals.iter().any(|refusal| refusal.kind == "rollout-conflict") {
        text.push_str(
            "  rollout-conflict: another rollout has the id already; if the ids of a file count from 0, put a text of its \
             own before them with --prefix\n",
        );
    }
    text
}

/// A number with its noun, in the singular if there is one of it.
fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

fn line<'n>(text: &mut String, title: &str, counts: impl Iterator<Item = (&'n str, u64)>) {
    let counts: Vec<String> = counts.map(|(name, count)| format!("{count} {}", shown(name))).collect();
    if !counts.is_empty() {
        let _ = writeln!(text, "  {title}: {}", counts.join(", "));
    }
}

/// Shows on a terminal how far the import is.
pub(super) struct Progress {
    file: String,
    position: Arc<Position>,
    is_shown: bool,
    last: Option<Instant>,
}

impl Progress {
    pub(super) fn new(file: &Path, position: Arc<Position>) -> Self {
        let is_shown = std::io::stderr().is_terminal();
        Self { file: file.display().to_string(), position, is_shown, last: None }
    }

    pub(super) fn show(&mut self, report: &ImportReport) {
        if !self.is_shown || self.last.is_some_and(|last| last.elapsed() < PROGRESS_EVERY) {
            return;
        }
        self.last = Some(Instant::now());
        let (read, total) = self.position.get();
        let share =
            total.filter(|&total| total > 0).map(|total| format!("{}%, ", read * 100 / total)).unwrap_or_default();
        let done = format!("{} rollouts, {} refused", report.stored + report.duplicates, report.refused);
        // The line is written over by the next one. Progress that cannot be shown is no error.
        let _ = write!(std::io::stderr(), "\r\x1b[K{}: {share}{:.1} MB, {done}", self.file, read as f64 / 1e6);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.last.is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_wire::{ImportRefusal, Violation};

    use super::*;

    #[test]
    fn one_document_and_one_rollout_are_singular() {
        let mut single = ImportReport { file: Some("a.jsonl".to_owned()), ..ImportReport::new("atif") };
        single.read_document(1, []);
        let text = report(&single);
        assert_eq!(
            text.lines().next(),
            Some("a.jsonl: 1 document with 1 rollout: 0 stored, 0 already there, 0 refused")
        );
    }

    #[test]
    fn ids_of_files_reach_the_terminal_without_control_characters_and_conflicts_name_the_prefix() {
        let mut conflict = ImportReport::new("chat");
        conflict.refused = 1;
        conflict.refusals.push(ImportRefusal {
            line: 1,
            rollout_id: Some("r\u{1b}[2J".to_owned()),
            kind: "rollout-conflict".to_owned(),
            pointer: String::new(),
            detail: "r\u{7} differs".to_owned(),
        });
        conflict.notes.insert("n\u{202e}".to_owned(), 1);
        let text = report(&conflict);
        assert!(!text.contains(|character: char| character != '\n' && character.is_control()), "{text:?}");
        assert!(
            text.contains("(r\u{fffd}[2J): rollout-conflict: r\u{fffd} differs") && !text.contains('\u{202e}'),
            "{text:?}"
        );
        assert!(text.contains("with --prefix"), "{text}");
    }

    #[test]
    fn a_report_says_what_was_refused_and_where() {
        let mut refused = ImportReport { file: Some("a.jsonl".to_owned()), ..ImportReport::new("atif") };
        refused.read_document(2, [("copied-context", 3)]);
        refused.stored = 2;
        refused.verdicts.late = 1;
        refused.verdicts.kept = 1;
        let violation = |detail: &str| Violation { pointer: "/steps/0".to_owned(), detail: detail.to_owned() };
        for line in 0..150 {
            refused.refuse_document(line, vec![violation("is wrong")]);
        }
        let text = report(&refused);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "a.jsonl: 151 documents with 2 rollouts: 2 stored, 0 already there, 150 refused");
        assert_eq!(lines[1], "  verdicts: 1 kept, 1 late");
        assert_eq!(lines[2], "  left out: 3 copied-context");
        assert_eq!(lines[3], "  line 0 /steps/0: invalid-document: is wrong");
        assert_eq!(lines.len(), 3 + 100 + 2);
        assert!(lines[103].contains("only the first 100"), "{}", lines[103]);
        assert!(json(&refused).ends_with("}\n"));
    }
}
