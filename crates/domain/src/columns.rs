//! Columns: what belongs to tokens besides id, mask and log-probability, such as the experts that a model chose.
//!
//! A token may have a thousand bytes of them, so they are uploads, which segments name by their digest. The rules of the
//! policy declare them. From an upload only its length is read, so everything is decided by counting.

use std::collections::BTreeMap;

use forebay_wire::{ColumnRule, PolicyRules, Violation};

use crate::{
    formats::canonical::escape,
    ids::{BlobDigest, check_name},
};

/// The most columns of a policy, and of a segment.
pub const COLUMNS_MAX: usize = 32;

/// The most columns of all segments of a rollout: each is looked up when it is stored.
pub const UPLOADS_MAX: usize = 4_096;

/// The most bytes of an upload of a column.
pub const COLUMN_BYTES_MAX: u64 = 4 << 30;

/// The most bytes of a row that is not ragged.
const ROW_BYTES_MAX: u64 = 64 << 10;

/// The most dimensions of a row.
const DIMENSIONS_MAX: usize = 3;

/// Bytes of an offset of a ragged column.
pub const OFFSET_BYTES: u64 = 4;

/// An upload that a segment names as a column of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PostedColumn {
    pub digest: BlobDigest,
    pub bytes: u64,
}

/// What the columns of a segment must fit.
#[derive(Clone, Debug, Default)]
pub struct SegmentShape {
    pub tokens: u64,
    pub response: u64,
    pub columns: BTreeMap<String, PostedColumn>,
}

/// Bytes of a row, or of a number of a ragged one.
#[must_use]
pub fn row_bytes(rule: &ColumnRule) -> u64 {
    let shape = if rule.ragged { &[][..] } else { &rule.shape[..] };
    shape.iter().fold(rule.dtype.bytes(), |bytes, length| bytes.saturating_mul((*length).into()))
}

/// What is wrong with the columns of the rules.
pub(crate) fn check_rules(rules: &PolicyRules, violations: &mut Vec<Violation>) {
    let mut push = |pointer: String, detail: String| violations.push(Violation { pointer, detail });
    if rules.columns.len() > COLUMNS_MAX {
        push("/columns".into(), format!("must be at most {COLUMNS_MAX} columns, are {}", rules.columns.len()));
        return;
    }
    for (name, rule) in &rules.columns {
        let pointer = format!("/columns/{}", escape(name));
        if let Err(detail) = check_name(name) {
            push(pointer.clone(), format!("the name {detail}"));
        } else if name.contains([',', ':', '=']) {
            push(pointer.clone(), "the name must not contain `,`, `:` or `=`: readers list names".to_owned());
        }
        if rule.shape.len() > DIMENSIONS_MAX {
            let detail = format!("must have at most {DIMENSIONS_MAX} dimensions, has {}", rule.shape.len());
            push(format!("{pointer}/shape"), detail);
        } else if rule.ragged && !rule.shape.is_empty() {
            push(format!("{pointer}/shape"), "must be absent of a ragged column, whose rows are lists".to_owned());
        } else if !(1..=ROW_BYTES_MAX).contains(&row_bytes(rule)) {
            let detail = format!("must be of 1 to {ROW_BYTES_MAX} bytes per row, is of {}", row_bytes(rule));
            push(format!("{pointer}/shape"), detail);
        }
    }
}

/// What is wrong with the columns of a rollout. It is found one after the other, because a body may have a quarter of a
/// million segments that lack all columns.
pub fn check<'a>(
    declared: &'a BTreeMap<String, ColumnRule>,
    segments: &'a [SegmentShape],
) -> impl Iterator<Item = Violation> + 'a {
    segments.iter().enumerate().flat_map(move |(index, segment)| {
        let violation = move |name: &str, detail: String| Violation {
            pointer: format!("/segments/{index}/columns/{}", escape(name)),
            detail,
        };
        let unknown = segment.columns.keys().filter(|name| !declared.contains_key(*name));
        let unknown = unknown.map(move |name| {
            let detail =
                format!("is not declared: the rules of the policy need `columns.{name}` with its dtype and shape");
            violation(name, detail)
        });
        let wrong = declared.iter().filter_map(move |(name, rule)| {
            let rows = rule.rows.count(segment.tokens, segment.response);
            match segment.columns.get(name) {
                None if rule.required && rows > 0 => {
                    Some(violation(name, format!("is required, with {}", expected(rule, rows))))
                }
                Some(found) if !fits(rule, rows, found.bytes) => {
                    let detail = format!("has {} bytes, but must have {}", found.bytes, expected(rule, rows));
                    Some(violation(name, detail))
                }
                _ => None,
            }
        });
        unknown.chain(wrong)
    })
}

/// Whether a column of so many rows may have so many bytes. An upload has at least one byte, so no rows have none.
fn fits(rule: &ColumnRule, rows: u64, bytes: u64) -> bool {
    let row_bytes = row_bytes(rule);
    if rule.ragged {
        let numbers = bytes.checked_sub((rows + 1) * OFFSET_BYTES);
        // Arrow counts them with 31 bits.
        return numbers
            .is_some_and(|bytes| bytes.is_multiple_of(row_bytes) && i32::try_from(bytes / row_bytes).is_ok());
    }
    rows.checked_mul(row_bytes) == Some(bytes)
}

fn expected(rule: &ColumnRule, rows: u64) -> String {
    let (dtype, row_bytes, of) = (rule.dtype.as_str(), row_bytes(rule), rule.rows.as_str());
    if rule.ragged {
        let offsets = (rows + 1) * OFFSET_BYTES;
        return format!(
            "{offsets} bytes of offsets for {rows} rows (`{of}`), and {row_bytes} bytes for each number of `{dtype}`"
        );
    }
    let bytes = rows.saturating_mul(row_bytes);
    format!("{bytes} bytes: {rows} rows (`{of}`) of {row_bytes} bytes, for shape {:?} of `{dtype}`", rule.shape)
}

/// What is wrong with the offsets of a ragged column of so many numbers, of which these come next; the one before them is
/// `last`, none at the beginning.
pub fn check_offsets(last: &mut Option<u32>, offsets: &[u8], numbers: u64) -> Result<(), String> {
    for offset in offsets.chunks_exact(OFFSET_BYTES as usize) {
        let offset = u32::from_le_bytes(offset.try_into().expect("chunks have this length"));
        let before = last.unwrap_or(0);
        if last.is_none() && offset != 0 {
            return Err(format!("begins with the offset {offset}, not with 0"));
        }
        if offset < before {
            return Err(format!("has the offset {offset} after {before}"));
        }
        if u64::from(offset) > numbers {
            return Err(format!("has the offset {offset}, but only {numbers} numbers"));
        }
        *last = Some(offset);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use forebay_wire::{ColumnDtype, ColumnRetention, ColumnRows};

    use super::*;

    fn rule(dtype: ColumnDtype, shape: &[u32]) -> ColumnRule {
        let (rows, retention) = (ColumnRows::default(), ColumnRetention::default());
        ColumnRule { dtype, shape: shape.to_vec(), rows, ragged: false, required: false, retention }
    }

    fn found(declared: &[(&str, ColumnRule)], columns: &[(&str, u64)]) -> Vec<String> {
        let posted =
            |&(name, bytes): &(&str, u64)| (name.to_owned(), PostedColumn { digest: BlobDigest([1; 32]), bytes });
        let segment = SegmentShape { tokens: 10, response: 4, columns: columns.iter().map(posted).collect() };
        let declared = declared.iter().map(|(name, rule)| ((*name).to_owned(), rule.clone())).collect();
        let other = SegmentShape { tokens: 1, ..SegmentShape::default() };
        let segments = [other, segment];
        check(&declared, &segments).map(|violation| format!("{} {}", violation.pointer, violation.detail)).collect()
    }

    #[test]
    fn columns_have_the_bytes_of_their_rows() {
        let experts =
            ColumnRule { rows: ColumnRows::SequenceButLast, required: true, ..rule(ColumnDtype::U8, &[48, 8]) };
        let entropy = rule(ColumnDtype::F32, &[]);
        let kept = ColumnRule { ragged: true, ..rule(ColumnDtype::I32, &[]) };
        let declared = [("a/b", experts), ("entropy", entropy), ("kept", kept)];
        let fitting = [("a/b", 9 * 384), ("entropy", 16), ("kept", 20 + 4 * 7)];
        assert_eq!(found(&declared, &fitting), Vec::<String>::new());
        assert_eq!(found(&declared, &[("a/b", 9 * 384)]), Vec::<String>::new());
        assert_eq!(
            found(&declared, &[("entropy", 17), ("kept", 21), ("other", 4)]),
            [
                "/segments/1/columns/other is not declared: the rules of the policy need `columns.other` with its dtype and \
                 shape",
                "/segments/1/columns/a~1b is required, with 3456 bytes: 9 rows (`sequence-1`) of 384 bytes, for shape [48, 8] \
                 of `u8`",
                "/segments/1/columns/entropy has 17 bytes, but must have 16 bytes: 4 rows (`response`) of 4 bytes, for shape \
                 [] of `f32`",
                "/segments/1/columns/kept has 21 bytes, but must have 20 bytes of offsets for 4 rows (`response`), and 4 bytes \
                 for each number of `i32`",
            ]
        );
        assert_eq!(found(&declared, &[("a/b", 9 * 384), ("kept", 19)]).len(), 1);
    }

    #[test]
    fn offsets_ascend_from_zero() {
        let of = |offsets: &[u32]| offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect::<Vec<u8>>();
        let check = |parts: &[&[u32]], numbers| {
            let mut last = None;
            parts.iter().try_for_each(|part| check_offsets(&mut last, &of(part), numbers)).map(|()| last)
        };
        assert_eq!(check(&[&[0, 3], &[3, 7]], 7), Ok(Some(7)));
        assert_eq!(check(&[&[1, 3]], 7), Err("begins with the offset 1, not with 0".to_owned()));
        assert_eq!(check(&[&[0, 3], &[2]], 7), Err("has the offset 2 after 3".to_owned()));
        assert_eq!(check(&[&[0, 8]], 7), Err("has the offset 8, but only 7 numbers".to_owned()));
    }

    #[test]
    fn rules_of_columns_are_bounded() {
        let pointers = |name: &str, of: ColumnRule| {
            let mut violations = Vec::new();
            let rules = PolicyRules { columns: [(name.to_owned(), of)].into(), ..PolicyRules::default() };
            check_rules(&rules, &mut violations);
            violations.into_iter().map(|violation| violation.pointer).collect::<Vec<_>>()
        };
        let none: [&str; 0] = [];
        assert_eq!(pointers("experts", rule(ColumnDtype::U8, &[64, 1_024, 1])), none);
        assert_eq!(pointers("experts", rule(ColumnDtype::U16, &[64, 1_024])), ["/columns/experts/shape"]);
        assert_eq!(pointers("experts", rule(ColumnDtype::U8, &[u32::MAX; 3])), ["/columns/experts/shape"]);
        assert_eq!(pointers("experts", rule(ColumnDtype::U8, &[0])), ["/columns/experts/shape"]);
        assert_eq!(pointers("experts", rule(ColumnDtype::U8, &[1; 4])), ["/columns/experts/shape"]);
        assert_eq!(pointers("a,b", rule(ColumnDtype::U8, &[])), ["/columns/a,b"]);
        let ragged = ColumnRule { ragged: true, ..rule(ColumnDtype::I32, &[2]) };
        assert_eq!(pointers("kept", ragged), ["/columns/kept/shape"]);
        let many = (0..33).map(|index| (index.to_string(), rule(ColumnDtype::U8, &[]))).collect();
        let mut violations = Vec::new();
        check_rules(&PolicyRules { columns: many, ..PolicyRules::default() }, &mut violations);
        assert_eq!(violations[0].pointer, "/columns");
    }
}
