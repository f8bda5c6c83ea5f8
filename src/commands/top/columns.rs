//! The columns of the overview: their texts, and which of them a terminal has room for.

use forebay_wire::{OverviewPolicy, PolicyCondition};
use jiff::Timestamp;
use ratatui::text::Span;

use super::{
    super::text::shown,
    figures::{ABSENT, ago, count, real, signed},
};

/// Spaces between two columns.
pub(super) const GAP: usize = 2;

/// The sentence of a policy is a column only if at least this much of it is visible.
const SENTENCE_MIN: usize = 30;

pub(super) struct Column {
    pub(super) title: &'static str,
    /// Whether it is aligned to the right.
    pub(super) is_number: bool,
    /// A terminal that is too narrow loses the column with the highest number first; columns with 0 stay.
    rank: u8,
    text: fn(&OverviewPolicy, Option<Timestamp>) -> String,
}

impl Column {
    /// The text of a policy. `now` is the time of the service.
    pub(super) fn text(&self, policy: &OverviewPolicy, now: Option<Timestamp>) -> String {
        (self.text)(policy, now)
    }

    /// Whether this is the sentence of a policy, which takes the room that is left.
    pub(super) fn is_sentence(&self) -> bool {
        self.title == "WHY"
    }
}

/// All columns, in their order.
pub(super) const COLUMNS: [Column; 11] = [
    Column { title: "POLICY", is_number: false, rank: 0, text: |policy, _| shown(&policy.policy) },
    Column { title: "STATE", is_number: false, rank: 0, text: |policy, _| state(policy.state) },
    Column { title: "IN/MIN", is_number: true, rank: 3, text: |policy, _| number(policy.received_per_min, count) },
    Column {
        title: "READY/NEED",
        is_number: true,
        rank: 1,
        text: |policy, _| format!("{}/{}", count(policy.ready_groups as f64), count(policy.needed_groups as f64)),
    },
    Column { title: "STALE MEAN/MAX", is_number: true, rank: 7, text: |policy, _| staleness(policy) },
    Column {
        title: "REWARD",
        is_number: true,
        rank: 2,
        text: |policy, _| number(policy.reward.and_then(|reward| reward.trained), |reward| real(reward, 2)),
    },
    Column {
        title: "Δ 20 STEPS",
        is_number: true,
        rank: 6,
        text: |policy, _| number(policy.reward.and_then(|reward| reward.change_20_steps), |change| signed(change, 2)),
    },
    Column {
        title: "LOST 1 H",
        is_number: true,
        rank: 4,
        text: |policy, _| number(policy.lost_last_hour.map(|lost| lost as f64), count),
    },
    Column {
        title: "LAST POST",
        is_number: true,
        rank: 5,
        text: |policy, now| ago(policy.last_post_at.as_deref(), now),
    },
    Column { title: "VERSION", is_number: true, rank: 8, text: |policy, _| format!("v{}", policy.version) },
    Column { title: "WHY", is_number: false, rank: 9, text: |policy, _| shown(&policy.headline) },
];

fn number(value: Option<f64>, text: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| ABSENT.to_owned(), text)
}

fn state(state: PolicyCondition) -> String {
    format!("{} {}", state.glyph(), state.as_str())
}

fn staleness(policy: &OverviewPolicy) -> String {
    let text = policy.staleness.map(|found| format!("{}/{}", real(found.mean, 1), count(found.max as f64)));
    text.unwrap_or_else(|| ABSENT.to_owned())
}

/// The columns that `width` cells have room for, each with its width. Only the name of a policy may be cut.
pub(super) fn fitting(
    policies: &[OverviewPolicy],
    now: Option<Timestamp>,
    width: usize,
) -> Vec<(&'static Column, usize)> {
    let needed = |column: &'static Column| {
        let texts = policies.iter().map(|policy| cells(&column.text(policy, now)));
        let needed = texts.max().unwrap_or(0).max(cells(column.title));
        if column.is_sentence() { needed.min(SENTENCE_MIN) } else { needed }
    };
    let mut columns: Vec<_> = COLUMNS.iter().map(|column| (column, needed(column))).collect();
    while total(&columns) > width
        && let Some(least) =
            (0..columns.len()).filter(|index| columns[*index].0.rank > 0).max_by_key(|index| columns[*index].0.rank)
    {
        columns.remove(least);
    }
    let (room, taken) = (width, total(&columns));
    if let Some((_, last)) = columns.last_mut().filter(|(column, _)| column.is_sentence()) {
        *last += room.saturating_sub(taken);
    } else if let Some((_, first)) = columns.first_mut() {
        *first = first.saturating_sub(taken.saturating_sub(room)).max(1);
    }
    columns
}

fn total(columns: &[(&Column, usize)]) -> usize {
    columns.iter().map(|(_, width)| width).sum::<usize>() + GAP * columns.len().saturating_sub(1)
}

/// The number of cells of a terminal that a text takes.
pub(super) fn cells(text: &str) -> usize {
    Span::raw(text).width()
}
