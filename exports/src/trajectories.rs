//! Trajectories, one per line, as `POST /trajectories` takes them: the format `forebay`, which imports read.

use std::io::Write;

use forebay_client::wire::ExportedRollout;

use crate::{ExportError, Writer, Written};

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

    /// Writes lines that are trajectories already.
    pub fn write_lines(&mut self, lines: &[u8]) -> Result<(), ExportError> {
        self.out.write_all(lines)?;
        self.rows += lines.split(|&byte| byte == b'\n').count() as u64 - 1;
        Ok(())
    }
}

impl<W: Write + Send> Writer for Trajectories<W> {
    fn write(&mut self, rollouts: &[ExportedRollout]) -> Result<(), ExportError> {
        for rollout in rollouts {
            serde_json::to_writer(&mut self.out, &rollout.trajectory)?;
            self.out.write_all(b"\n")?;
        }
        self.rows += rollouts.len() as u64;
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<Written, ExportError> {
        self.out.flush()?;
        Ok(Written { rows: self.rows, left_out: Vec::new() })
    }
}
