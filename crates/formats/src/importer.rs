//! Cuts a source into documents and passes them to the reader of the format. Only one document is held at a time.

use std::{
    collections::VecDeque,
    io::{self, BufRead, Read as _},
};

use forebay_wire::Violation;

use crate::{
    format::{Document, Format, Layout, Reader, Record},
    options::Options,
};

/// The most bytes of one document. A larger one is refused without being held.
pub const DOCUMENT_BYTES_MAX: usize = 256 << 20;

/// U+FEFF in UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Reads records from a source.
pub struct Importer<R> {
    source: R,
    layout: Layout,
    reader: Box<dyn Reader>,
    document_bytes_max: usize,
    /// Records that were read and not yet returned.
    ready: VecDeque<Record>,
    /// The line that is read next, counted from 1.
    line: u64,
    bytes: u64,
    ended: bool,
}

impl<R: BufRead> Importer<R> {
    /// Begins to read a source of a format.
    #[must_use]
    pub fn new(format: &Format, options: &Options, source: R) -> Self {
        Self {
            source,
            layout: format.layout,
            reader: (format.reader)(options),
            document_bytes_max: DOCUMENT_BYTES_MAX,
            ready: VecDeque::new(),
            line: 1,
            bytes: 0,
            ended: false,
        }
    }

    /// The same importer with another bound of a document.
    #[must_use]
    pub fn with_document_bytes_max(self, document_bytes_max: usize) -> Self {
        Self { document_bytes_max, ..self }
    }

    /// The number of bytes that were read.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the next record, or `None` at the end of the source.
    pub fn next_record(&mut self) -> io::Result<Option<Record>> {
        loop {
            if let Some(record) = self.ready.pop_front() {
                return Ok(Some(record));
            }
            if self.ended {
                return Ok(None);
            }
            let mut found = Vec::new();
            self.step(&mut found)?;
            self.ready.extend(found);
        }
    }

    /// Reads one document, or the end.
    fn step(&mut self, found: &mut Vec<Record>) -> io::Result<()> {
        match self.next_document()? {
            None => self.reader.end(found),
            Some((line, None)) => found.push(self.too_long(line)),
            Some((line, Some(text))) => self.reader.read(&Document { line, text: text.trim_ascii() }, found),
        }
        Ok(())
    }

    /// Returns the next document as text with the line on which it begins, or `None` at the end of the source. A document
    /// that is too long has no text.
    pub fn next_document(&mut self) -> io::Result<Option<(u64, Option<Vec<u8>>)>> {
        while !self.ended {
            let line = self.line;
            let mut text = Vec::new();
            match self.read_line(&mut text)? {
                Line::End => break,
                Line::TooLong => return Ok(Some((line, None))),
                Line::Read => {}
            }
            // Some programs of Windows begin a file with a byte order mark, which is no part of its JSON.
            if line == 1 && text.starts_with(BYTE_ORDER_MARK) {
                text.drain(..BYTE_ORDER_MARK.len());
            }
            if text.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            // The first line that is not empty decides for the whole source.
            if self.layout == Layout::LinesOrDocument {
                self.layout = Layout::Lines;
                if !is_whole(&text) {
                    let room = (self.document_bytes_max - text.len()) as u64;
                    self.bytes += self.source.by_ref().take(room + 1).read_to_end(&mut text)? as u64;
                    if text.len() > self.document_bytes_max {
                        // The rest of the source belongs to the same document.
                        self.ended = true;
                        return Ok(Some((line, None)));
                    }
                }
            }
            return Ok(Some((line, Some(text))));
        }
        self.ended = true;
        Ok(None)
    }

    /// Reads a line of bounded length. The rest of a longer one is passed over.
    fn read_line(&mut self, text: &mut Vec<u8>) -> io::Result<Line> {
        let room = self.document_bytes_max as u64 + 1;
        let read = self.source.by_ref().take(room).read_until(b'\n', text)?;
        self.bytes += read as u64;
        if read == 0 {
            return Ok(Line::End);
        }
        self.line += 1;
        if text.len() <= self.document_bytes_max || text.last() == Some(&b'\n') {
            return Ok(Line::Read);
        }
        text.clear();
        self.bytes += self.source.skip_until(b'\n')? as u64;
        Ok(Line::TooLong)
    }

    fn too_long(&self, line: u64) -> Record {
        let detail = format!("a document may have at most {} bytes", self.document_bytes_max);
        Record { line, outcome: Err(vec![Violation { pointer: String::new(), detail }]) }
    }
}

enum Line {
    Read,
    TooLong,
    End,
}

/// Whether brackets outside of texts are closed again, so that the text may be a whole JSON value.
fn is_whole(text: &[u8]) -> bool {
    let (mut depth, mut in_text, mut escaped) = (0_i64, false, false);
    for &byte in text {
        if in_text {
            in_text = escaped || byte != b'"';
            escaped = !escaped && byte == b'\\';
            continue;
        }
        match byte {
            b'"' => in_text = true,
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            _ => {}
        }
    }
    depth <= 0 && !in_text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Imported, each};

    const LINES: Format = Format {
        name: "test",
        about: "documents as text",
        layout: Layout::Lines,
        reader: |options| each(options, |document, _| Err(vec![violation(document)])),
    };

    const EITHER: Format = Format { layout: Layout::LinesOrDocument, ..LINES };

    fn violation(document: &Document<'_>) -> Violation {
        Violation { pointer: String::new(), detail: String::from_utf8_lossy(document.text).into_owned() }
    }

    fn read(format: &Format, source: &str, max: usize) -> Vec<(u64, String)> {
        let mut importer = Importer::new(format, &Options::default(), source.as_bytes()).with_document_bytes_max(max);
        let mut found = Vec::new();
        while let Some(record) = importer.next_record().expect("a slice can be read") {
            found.push((
                record.line,
                record.outcome.expect_err("the test's format refuses everything").remove(0).detail,
            ));
        }
        assert_eq!(importer.bytes(), source.len() as u64, "every byte is read");
        found
    }

    #[test]
    fn lines_are_counted_and_empty_ones_passed_over() {
        let found = read(&LINES, "\n{\"a\":1}\r\n  \n{\"b\":2}", 100);
        assert_eq!(found, [(2, "{\"a\":1}".to_owned()), (4, "{\"b\":2}".to_owned())]);
        assert!(read(&LINES, "", 100).is_empty());
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_a_document() {
        assert_eq!(read(&LINES, "\u{feff}{}\n{}", 100), [(1, "{}".to_owned()), (2, "{}".to_owned())]);
        assert_eq!(read(&EITHER, "\u{feff}\n{\n}", 100), [(2, "{\n}".to_owned())]);
    }

    #[test]
    fn a_source_is_one_document_if_its_first_line_is_not_whole() {
        let indented = "{\n \"a\": \"}\"\n}\n";
        assert_eq!(read(&EITHER, indented, 100), [(1, indented.trim().to_owned())]);
        assert_eq!(read(&LINES, indented, 100).len(), 3);
        assert_eq!(read(&EITHER, "{\"a\":\"{\"}\n{\n{}\n", 100).len(), 3, "later lines stand alone");
    }

    #[test]
    fn a_long_document_is_refused_and_the_next_one_read() {
        let source = format!("{}\n{{}}\n{}", "x".repeat(50), "y".repeat(9));
        let found = read(&LINES, &source, 10);
        assert_eq!(found[0].1, "a document may have at most 10 bytes");
        assert_eq!(found[1..], [(2, "{}".to_owned()), (3, "y".repeat(9))]);
    }

    #[test]
    fn a_reader_may_keep_a_rollout_until_the_end() {
        struct Last(Option<u64>);
        impl Reader for Last {
            fn read(&mut self, document: &Document<'_>, _: &mut Vec<Record>) {
                self.0 = Some(document.line);
            }
            fn end(&mut self, found: &mut Vec<Record>) {
                found.extend(self.0.map(|line| Record { line, outcome: Ok(Imported::default()) }));
            }
        }
        let format = Format { reader: |_| Box::new(Last(None)), ..LINES };
        let mut importer = Importer::new(&format, &Options::default(), &b"{}\n{}\n"[..]);
        let record = importer.next_record().expect("a slice can be read").expect("there is a record");
        assert_eq!(record.line, 2);
        assert!(importer.next_record().expect("a slice can be read").is_none());
    }
}
