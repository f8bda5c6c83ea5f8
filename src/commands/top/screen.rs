//! What the screen of `forebay top` shows, and what the keys do to it.

use std::time::{Duration, Instant};

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use forebay_wire::{OverviewPolicy, PolicyWhy};
use jiff::{SignedDuration, Timestamp};
use ratatui::widgets::TableState;

/// All policies that the key may access, as the service answered.
pub(super) struct Found {
    /// The service's time.
    pub(super) at: Option<Timestamp>,
    /// The policies, the worst first.
    pub(super) policies: Vec<OverviewPolicy>,
    /// Whether there are no more.
    pub(super) is_whole: bool,
}

/// What a key asks for beyond the screen itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// End the program.
    Quit,
    /// Ask the service now.
    Ask,
}

/// The reasons of one policy, on top of the overview.
pub(super) struct Reading {
    pub(super) policy: String,
    /// Its reasons, when the service has answered. `Err` says why it cannot be shown.
    pub(super) why: Option<Result<Box<PolicyWhy>, String>>,
    /// First line that is visible.
    pub(super) scroll: usize,
}

pub(super) struct Screen {
    /// URL of the service.
    pub(super) url: String,
    /// Time between two questions.
    pub(super) every: Duration,
    /// The newest answer.
    pub(super) shown: Found,
    /// When it came.
    pub(super) answered: Instant,
    /// Why there is no newer answer.
    pub(super) failure: Option<String>,
    /// Whether the service is asked only on request.
    pub(super) is_paused: bool,
    /// The chosen row and the first visible row.
    pub(super) table: TableState,
    /// The reasons of one policy, if they are open.
    pub(super) reading: Option<Reading>,
    /// Number of lines that the middle of the screen had when it was drawn last.
    pub(super) lines: usize,
}

impl Screen {
    pub(super) fn new(url: String, every: Duration, shown: Found) -> Self {
        let chosen = (!shown.policies.is_empty()).then_some(0);
        Self {
            url,
            every,
            shown,
            answered: Instant::now(),
            failure: None,
            is_paused: false,
            table: TableState::default().with_selected(chosen),
            reading: None,
            lines: 1,
        }
    }

    /// The service's time now, from its time in the newest answer.
    pub(super) fn now(&self) -> Option<Timestamp> {
        let passed = SignedDuration::try_from(self.answered.elapsed()).ok()?;
        self.shown.at?.checked_add(passed).ok()
    }

    pub(super) fn chosen(&self) -> Option<&OverviewPolicy> {
        self.shown.policies.get(self.table.selected()?)
    }

    /// Shows a newer answer. The same policy stays chosen, wherever its row is now.
    pub(super) fn answer(&mut self, shown: Found) {
        let name = self.chosen().map(|policy| policy.policy.clone());
        let row = name.and_then(|name| shown.policies.iter().position(|policy| policy.policy == name));
        let last = shown.policies.len().checked_sub(1);
        self.table.select(row.or_else(|| last.map(|last| self.table.selected().unwrap_or(0).min(last))));
        self.shown = shown;
        self.answered = Instant::now();
        self.failure = None;
    }

    /// Shows the reasons of a policy, if they are still open.
    pub(super) fn explain(&mut self, policy: &str, why: Result<Option<PolicyWhy>, String>) {
        let Some(reading) = self.reading.as_mut().filter(|reading| reading.policy == policy) else { return };
        reading.why = Some(match why {
            Ok(Some(why)) => Ok(Box::new(why)),
            Ok(None) => Err("There is no such policy, or the key may no longer access it.".to_owned()),
            // An older answer is better than none; the status line says why there is no newer one.
            Err(_) if matches!(reading.why, Some(Ok(_))) => return,
            Err(failure) => Err(failure),
        });
    }

    /// Obeys a key.
    pub(super) fn press(&mut self, key: KeyEvent) -> Option<Wish> {
        let has_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c' | 'd') if has_control => return Some(Wish::Quit),
            KeyCode::Char('q') => return Some(Wish::Quit),
            KeyCode::Char('r') => return Some(Wish::Ask),
            KeyCode::Char('p') => {
                self.is_paused = !self.is_paused;
                return (!self.is_paused).then_some(Wish::Ask);
            }
            KeyCode::Esc | KeyCode::Backspace | KeyCode::Left => self.reading = None,
            KeyCode::Enter | KeyCode::Right if self.reading.is_none() => return self.open(),
            code => self.step(code),
        }
        None
    }

    fn open(&mut self) -> Option<Wish> {
        let policy = self.chosen()?.policy.clone();
        self.reading = Some(Reading { policy, why: None, scroll: 0 });
        Some(Wish::Ask)
    }

    /// Moves through the reasons that are open, otherwise through the policies.
    fn step(&mut self, code: KeyCode) {
        let page = self.lines.max(1) as isize;
        let by = match code {
            KeyCode::Up | KeyCode::Char('k') => -1,
            KeyCode::Down | KeyCode::Char('j') => 1,
            KeyCode::PageUp => -page,
            KeyCode::PageDown | KeyCode::Char(' ') => page,
            KeyCode::Home | KeyCode::Char('g') => isize::MIN,
            KeyCode::End | KeyCode::Char('G') => isize::MAX,
            _ => return,
        };
        if let Some(reading) = &mut self.reading {
            // Drawing bounds it: only then the number of lines is known.
            reading.scroll = reading.scroll.saturating_add_signed(by);
        } else {
            let last = self.shown.policies.len().checked_sub(1);
            let row = self.table.selected().unwrap_or(0).saturating_add_signed(by);
            self.table.select(last.map(|last| row.min(last)));
        }
    }
}
