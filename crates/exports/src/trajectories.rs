//! Trajectories, one per line, as `POST /trajectories` takes them: the format `forebay`, which imports read.

use std::io::Write;

use forebay_wire::{ExportedRollout, Trajectory};

use crate::{ExportError, Writer, Written, lines};

/// Writes trajectories as NDJSON.
pub struct Trajectories<W> {
    out: W,
    rows: u64,
}

impl<W: Write + Send> Trajectories<W> {
    /// Writes to `out`, which should be buffered.
    pub fn new(out: W) -> Self {
        Self { out, rows: 0 }
    }
}

impl<W: Write + Send> Writer for Trajectories<W> {
    fn write(&mut self, rollouts: &[ExportedRollout]) -> Result<(), ExportError> {
        let trajectories: Vec<&Trajectory> = rollouts.iter().map(|rollout| &rollout.trajectory).collect();
        lines::write(&mut self.out, &trajectories)?;
        self.rows += rollouts.len() as u64;
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<Written, ExportError> {
        self.out.flush()?;
        Ok(Written { rows: self.rows, ..Written::default() })
    }
}
