//! Draws the screen.

use forebay_wire::PolicyCondition;
use ratatui::{
    Frame,
    layout::{Alignment, Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Borders, Cell, Paragraph, Row, Table, Wrap},
};

use super::{
    super::{text::shown, why},
    columns::{GAP, cells, fitting},
    figures::{duration, plural},
    screen::{Reading, Screen},
};

/// Lines of the sentence below the table, with the line above it.
const SENTENCE_LINES: u16 = 3;

/// Below this height of the terminal only the table is drawn between the first and the last line.
const HEIGHT_MIN: u16 = 10;

/// How policies with a condition stand out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Bad,
    Warning,
    Good,
    Quiet,
}

impl Kind {
    pub(super) fn of(state: PolicyCondition) -> Self {
        match state {
            PolicyCondition::Broken | PolicyCondition::Stuck | PolicyCondition::Starved => Self::Bad,
            PolicyCondition::Untaken
            | PolicyCondition::HeldBack
            | PolicyCondition::Stale
            | PolicyCondition::Flat
            | PolicyCondition::Dropping => Self::Warning,
            PolicyCondition::Fed => Self::Good,
            PolicyCondition::Idle => Self::Quiet,
        }
    }
}

/// The styles, with colours or without. What they say, the text says too.
#[derive(Clone, Copy)]
pub(super) struct Theme {
    /// Whether to use colours.
    pub(super) has_colours: bool,
}

impl Theme {
    fn of(self, kind: Kind) -> Style {
        let (colour, modifier) = match kind {
            Kind::Bad => (Color::Red, Modifier::BOLD),
            Kind::Warning => (Color::Yellow, Modifier::empty()),
            Kind::Good => (Color::Green, Modifier::empty()),
            Kind::Quiet => (Color::Reset, Modifier::DIM),
        };
        let style = Style::new().add_modifier(modifier);
        if self.has_colours { style.fg(colour) } else { style }
    }
}

/// Draws the screen. Bounds what the keys have moved by the room that there is.
pub(super) fn draw(frame: &mut Frame<'_>, screen: &mut Screen, theme: Theme) {
    let [title, status, middle, keys] =
        Layout::vertical([Constraint::Length(1), Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)])
            .areas(frame.area());
    draw_title(frame, title, screen);
    frame.render_widget(status_line(screen, theme), status);
    if screen.reading.is_some() {
        draw_reasons(frame, middle, screen, theme);
    } else if screen.shown.policies.is_empty() {
        let text = "No policies. A policy appears here with its rules or its first rollout, if the key may access it.";
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), middle);
    } else {
        let sentence_lines = if frame.area().height < HEIGHT_MIN { 0 } else { SENTENCE_LINES };
        let [table, sentence] =
            Layout::vertical([Constraint::Min(0), Constraint::Length(sentence_lines)]).areas(middle);
        draw_table(frame, table, screen, theme);
        draw_sentence(frame, sentence, screen);
    }
    frame.render_widget(key_line(screen, theme), keys);
}

fn draw_title(frame: &mut Frame<'_>, area: Rect, screen: &Screen) {
    let clock = screen.now().map(|now| now.strftime("%H:%M:%S UTC").to_string()).unwrap_or_default();
    let [left, right] = Layout::horizontal([Constraint::Min(0), Constraint::Length(cells(&clock) as u16)])
        .spacing(GAP as u16)
        .areas(area);
    let name = Span::styled("forebay", Modifier::BOLD);
    frame.render_widget(Line::from(vec![name, Span::raw("  "), Span::raw(shown(&screen.url))]), left);
    frame.render_widget(Line::raw(clock), right);
}

/// How many policies need somebody, or why there is no newer answer.
fn status_line(screen: &Screen, theme: Theme) -> Line<'static> {
    if let Some(failure) = &screen.failure {
        let age = duration(screen.answered.elapsed());
        let style = theme.of(Kind::Bad).add_modifier(Modifier::REVERSED);
        return Line::styled(format!("No answer for {age}: {}", shown(failure)), style);
    }
    let mut spans = vec![Span::raw(summary(screen))];
    let policies = &screen.shown.policies;
    for (kind, one, more) in [(Kind::Bad, "needs you", "need you"), (Kind::Warning, "to look at", "to look at")] {
        let mut of_kind = policies.iter().filter(|policy| Kind::of(policy.state) == kind);
        if let Some(first) = of_kind.next() {
            let number = 1 + of_kind.count();
            let words = if number == 1 { one } else { more };
            spans.push(Span::raw("  "));
            spans.push(Span::styled(format!("{} {number} {words}", first.state.glyph()), theme.of(kind)));
        }
    }
    if screen.is_paused {
        let age = duration(screen.answered.elapsed());
        spans.push(Span::raw("  "));
        spans.push(Span::styled(format!("paused, the numbers are {age} old"), Modifier::REVERSED));
    }
    Line::from(spans)
}

/// "3 policies", or the same for the worst of more.
fn summary(screen: &Screen) -> String {
    let number = plural(screen.shown.policies.len(), "policy", "policies");
    if screen.shown.is_whole { number } else { format!("the worst {number} of more") }
}

fn draw_table(frame: &mut Frame<'_>, area: Rect, screen: &mut Screen, theme: Theme) {
    screen.lines = area.height.saturating_sub(1).into();
    let (now, policies) = (screen.now(), &screen.shown.policies);
    let columns = fitting(policies, now, area.width.into());
    let aligned = |text: String, is_number| {
        let alignment = if is_number { Alignment::Right } else { Alignment::Left };
        Line::raw(text).alignment(alignment)
    };
    let rows = policies.iter().map(|policy| {
        let kind = theme.of(Kind::of(policy.state));
        Row::new(columns.iter().map(|(column, _)| {
            let cell = Cell::new(aligned(column.text(policy, now), column.is_number));
            if column.title == "STATE" { cell.style(kind) } else { cell }
        }))
    });
    let header = Row::new(columns.iter().map(|(column, _)| aligned(column.title.to_owned(), column.is_number)));
    let widths = columns.iter().map(|(_, width)| Constraint::Length(*width as u16));
    let table = Table::new(rows, widths)
        .header(header.style(Modifier::BOLD))
        .column_spacing(GAP as u16)
        .row_highlight_style(Modifier::REVERSED);
    frame.render_stateful_widget(table, area, &mut screen.table);
}

/// The sentence of the chosen policy, whole: the table may have no room for it.
fn draw_sentence(frame: &mut Frame<'_>, area: Rect, screen: &Screen) {
    let Some(policy) = screen.chosen() else { return };
    let title = format!(" {} {} ", policy.state.glyph(), shown(&policy.policy));
    let sentence = Paragraph::new(shown(&policy.headline)).wrap(Wrap { trim: true });
    frame.render_widget(sentence.block(Block::new().borders(Borders::TOP).title(title)), area);
}

fn draw_reasons(frame: &mut Frame<'_>, area: Rect, screen: &mut Screen, theme: Theme) {
    let Some(reading) = &mut screen.reading else { return };
    let block = Block::new().borders(Borders::TOP).title(format!(" why {} ", shown(&reading.policy)));
    let room = block.inner(area);
    screen.lines = room.height.into();
    let lines = reasons(reading, room.width.into());
    let below = lines.len().saturating_sub(room.height.into());
    reading.scroll = reading.scroll.min(below);
    let state = reading.why.as_ref().and_then(|why| why.as_ref().ok()).map(|why| why.state);
    let visible = lines.into_iter().enumerate().skip(reading.scroll).take(room.height.into());
    let visible: Vec<Line<'_>> = visible
        .map(|(index, line)| match state {
            Some(state) if index == 0 => Line::styled(line, theme.of(Kind::of(state))),
            _ => Line::raw(line),
        })
        .collect();
    let hidden = below - reading.scroll;
    let block =
        if hidden == 0 { block } else { block.title(Line::raw(format!(" {hidden} more below ")).right_aligned()) };
    frame.render_widget(Paragraph::new(visible).block(block), area);
}

fn reasons(reading: &Reading, width: usize) -> Vec<String> {
    let text = match &reading.why {
        None => "Asking the service.".to_owned(),
        // The screen shows the address of the service above.
        Some(Ok(why)) => why::of_policy(why, "."),
        Some(Err(failure)) => shown(failure),
    };
    text.lines().flat_map(|line| wrapped(line, width)).collect()
}

/// Breaks a line where the width ends; what follows is indented like the text of the line.
fn wrapped(line: &str, width: usize) -> Vec<String> {
    let text = line.trim_start();
    let text = text.trim_start_matches(|character: char| character.is_ascii_digit());
    let text = text.strip_prefix(". ").or_else(|| text.strip_prefix("- ")).unwrap_or(line.trim_start());
    let indent = " ".repeat((line.len() - text.len()).min(width / 2));
    let options = textwrap::Options::new(width.max(1)).subsequent_indent(&indent);
    textwrap::wrap(line, options).into_iter().map(std::borrow::Cow::into_owned).collect()
}

fn key_line(screen: &Screen, theme: Theme) -> Line<'static> {
    let pause = if screen.is_paused { "p go on" } else { "p pause" };
    let keys = match &screen.reading {
        Some(_) => format!("↑↓ scroll  Esc back  r refresh  {pause}  q quit"),
        None => format!("↑↓ choose  Enter why  r refresh  {pause}  q quit"),
    };
    Line::styled(keys, theme.of(Kind::Quiet))
}
