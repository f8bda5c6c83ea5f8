//! The intake of a commit: which waiting commands it still takes.

use std::time::{Duration, Instant};

use super::{Queue, command::Command};

/// The most commands of one commit. Their answers wait for one fsync together.
const COMMIT_COMMANDS_MAX: usize = 64;

/// The most payload bytes of one commit.
const COMMIT_BYTES_MAX: usize = 8 << 20;

/// How long a commit keeps taking bulk commands once it contains an urgent one. It is long enough that a stream of
/// urgent commands does not make every bulk command pay for its own fsync.
const URGENT_COMMIT: Duration = Duration::from_millis(5);

/// The commands of one commit, which it takes one after the other.
pub(super) struct Intake {
    pub(super) commands: Vec<Box<dyn Command>>,
    /// How many of them have been handed out to run.
    begun: usize,
    bytes: usize,
    urgent: bool,
    pub(super) started: Instant,
}

impl Intake {
    pub(super) fn new(first: Box<dyn Command>) -> Self {
        let mut intake = Self { commands: Vec::new(), begun: 0, bytes: 0, urgent: false, started: Instant::now() };
        intake.push(first);
        intake
    }

    fn push(&mut self, command: Box<dyn Command>) {
        self.bytes += command.bytes();
        self.urgent |= command.is_urgent();
        self.commands.push(command);
    }

    /// The next command to run: control before bulk, within the bounds of a commit.
    pub(super) fn next(&mut self, control: &mut Queue, bulk: &mut Queue) -> Option<&mut Box<dyn Command>> {
        let full = self.commands.len() >= COMMIT_COMMANDS_MAX || self.bytes >= COMMIT_BYTES_MAX;
        let closes = self.commands.last().is_some_and(|command| command.closes());
        if self.begun == self.commands.len() && !full && !closes {
            let hurry = || self.urgent && self.started.elapsed() >= URGENT_COMMIT;
            let next = control.try_recv().or_else(|empty| if hurry() { Err(empty) } else { bulk.try_recv() });
            if let Ok(command) = next {
                self.push(command);
            }
        }
        let command = self.commands.get_mut(self.begun)?;
        self.begun += 1;
        Some(command)
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;
    use crate::dialect::sqlite::writer::command::Idle;

    /// The commands that a commit takes from full queues when it began `ago`: whether each is urgent.
    fn taken(first: bool, ago: Duration) -> Vec<bool> {
        let (control, mut control_queue) = mpsc::channel::<Box<dyn Command>>(2);
        let (bulk, mut bulk_queue) = mpsc::channel::<Box<dyn Command>>(2);
        for _ in 0..2 {
            assert!(control.try_send(Box::new(Idle { is_urgent: true })).is_ok());
            assert!(bulk.try_send(Box::new(Idle { is_urgent: false })).is_ok());
        }
        let mut intake = Intake::new(Box::new(Idle { is_urgent: first }));
        intake.started = intake.started.checked_sub(ago).expect("the machine has been up for that long");
        let mut taken = Vec::new();
        while let Some(command) = intake.next(&mut control_queue, &mut bulk_queue) {
            taken.push(command.is_urgent());
        }
        taken
    }

    #[test]
    fn a_commit_takes_control_first_and_soon_no_more_bulk_once_a_lease_is_in_it() {
        let while_ago = 2 * URGENT_COMMIT;
        assert_eq!(taken(false, Duration::ZERO), [false, true, true, false, false]);
        assert_eq!(taken(false, while_ago), [false, true, true]);
        assert_eq!(taken(true, while_ago), [true, true, true]);
    }
}
