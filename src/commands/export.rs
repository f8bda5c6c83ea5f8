//! `forebay export`: writes the rollouts of a policy as a data set.
//!
//! Pages are read, parsed and written on different threads, one page ahead of the other, so that the command holds a few
//! pages and no more. A file gets its name when it is complete.

mod columns;
mod source;
mod target;

use std::{
    io::{IsTerminal as _, Write as _},
    path::PathBuf,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use clap::Args;
use forebay_domain::ids::PolicyName;
use forebay_exports::{Format, Requirement, Unreadable, Writer, Written};
use forebay_wire::{ExportCounts, RolloutState, Verdict};
use tokio::sync::mpsc;

use self::{
    source::{Page, PlaceArgs, Source},
    target::Target,
};
use super::{media::MediaFolder, text::shown};

/// Pages that wait to be written, while one is read and one is written.
const PAGES_AHEAD: usize = 1;

/// Time between two lines of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// The exit code of an export that lacks rollouts or messages which nobody asked to leave out.
pub(crate) const INCOMPLETE: u8 = 3;

/// The arguments of `forebay export`.
#[derive(Args)]
pub(crate) struct ExportArgs {
    /// Format: parquet, ndjson, sts, pairs or forebay
    #[arg(long, value_name = "FORMAT")]
    format: Format,
    /// File to write, or `-` for the standard output. For sts, a folder that does not exist. Pairs are Parquet if the
    /// name ends with `.parquet`, and otherwise NDJSON
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
    /// Only rows that have `messages` or `tokens`. Trainers on text need `messages`, which only the first row of a
    /// rollout has
    #[arg(long, value_name = "COLUMN")]
    require: Option<Requirement>,
    /// Name of the agent's program in session traces
    #[arg(long, default_value = "forebay", value_name = "NAME")]
    harness: String,
    /// Folder for the images that messages name, each in a file named by its digest; the messages keep the addresses
    #[arg(long, value_name = "FOLDER")]
    media: Option<PathBuf>,
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Which rollouts to export.
#[derive(Args)]
#[command(next_help_heading = "Which rollouts")]
pub(crate) struct Selection {
    /// Policy
    #[arg(long, default_value = "default", value_parser = policy, value_name = "POLICY")]
    policy: PolicyName,
    /// Run of the policy [default: the current one]
    #[arg(long, value_name = "RUN")]
    run: Option<i64>,
    /// Only rollouts for which this CEL expression is true; docs/filters.md lists the variables of scope `rollout`
    #[arg(long = "where", value_name = "CEL")]
    expression: Option<String>,
    /// Only rollouts in these states, e.g. trained,checkpointed
    #[arg(long, value_delimiter = ',', value_parser = named::<RolloutState>, value_name = "STATES")]
    state: Vec<RolloutState>,
    /// Only rollouts with these verdicts, e.g. kept
    #[arg(long, value_delimiter = ',', value_parser = named::<Verdict>, value_name = "VERDICTS")]
    verdict: Vec<Verdict>,
    /// Only rollouts with at least this reward
    #[arg(long, allow_negative_numbers = true, value_name = "REWARD")]
    min_reward: Option<f64>,
}

/// The export is written, but rollouts or messages are missing.
#[derive(Debug, thiserror::Error)]
#[error("the export is written without {0}")]
pub(crate) struct Incomplete(String);

impl Incomplete {
    /// None if the export has everything that was asked for.
    fn of(written: &Written, counts: ExportCounts) -> Option<Self> {
        let missing = [
            (counts.damaged, "rollouts whose stored data is damaged; `forebay doctor` lists them"),
            (written.unreadable.messages, "messages that cannot be read"),
        ];
        let missing: Vec<String> =
            missing.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
        (!missing.is_empty()).then(|| Self(missing.join(", and without ")))
    }
}

fn policy(name: &str) -> Result<PolicyName, String> {
    PolicyName::parse(name).map_err(|error| error.to_string())
}

/// A value of an enum by its name on the wire.
fn named<T: serde::de::DeserializeOwned>(name: &str) -> Result<T, String> {
    serde_json::from_value(serde_json::Value::String(name.to_owned())).map_err(|error| error.to_string())
}

/// Writes an export, and prints a summary to standard error.
pub(crate) async fn export(args: ExportArgs) -> anyhow::Result<()> {
    let begun = Instant::now();
    let target = Target::open(&args.output, args.format, args.force)?;
    let media = args.media.as_deref().map(MediaFolder::create).transpose()?;
    let source = args.place.open(&args.selection).await?;
    let written = target.bytes();
    let copy = async {
        let writer = target.writer(args.format, args.require, args.harness)?;
        transfer(source, writer, media, &written).await
    };
    // Without a name, the unfinished file is removed when the target is dropped.
    let (rows, counts) = tokio::select! {
        copied = copy => copied?,
        _ = tokio::signal::ctrl_c() => bail!("interrupted, nothing is written"),
    };
    target.name(args.force)?;
    let summary = summary(&rows, counts, written.load(Ordering::Relaxed), begun.elapsed());
    eprintln!("exported {summary}");
    if counts.rollouts == 0 && counts.filtered == 0 {
        let policy = &args.selection.policy;
        eprintln!("policy `{policy}` has no rollout to export: --policy names another, and each export has one policy");
    }
    list(&rows.unreadable);
    Incomplete::of(&rows, counts).map_or(Ok(()), |incomplete| Err(incomplete.into()))
}

/// Prints the first messages that cannot be read.
fn list(unreadable: &Unreadable) {
    for message in &unreadable.listed {
        eprintln!("  {}", shown(&message.to_string()));
    }
    if unreadable.messages > unreadable.listed.len() as u64 {
        eprintln!("  and more: only the first {} are listed", unreadable.listed.len());
    }
}

/// Reads pages and has them written by a thread of their own.
async fn transfer(
    mut source: Source,
    mut writer: Box<dyn Writer>,
    mut media: Option<MediaFolder>,
    written: &std::sync::atomic::AtomicU64,
) -> anyhow::Result<(Written, ExportCounts)> {
    let (pages, mut queue) = mpsc::channel::<Option<Page>>(PAGES_AHEAD);
    let write = tokio::task::spawn_blocking(move || -> anyhow::Result<Written> {
        // Only an explicit end is one. If reading fails, the queue is closed without it, and nothing may complete the file.
        while let Some(page) = queue.blocking_recv().context("the export was not read to its end")? {
            match page {
                Page::Rollouts(rollouts) => writer.write(&rollouts)?,
                Page::Batch(batch) => writer.write_batch(batch)?,
            }
        }
        Ok(writer.finish()?)
    });
    let mut progress = Progress::default();
    let read: anyhow::Result<()> = async {
        while let Some(page) = source.page().await? {
            if let Some(folder) = &mut media {
                source.write_media(&page, folder).await?;
            }
            // If the writer has failed, its error is reported below.
            if pages.send(Some(page)).await.is_err() {
                break;
            }
            progress.show(written.load(Ordering::Relaxed));
        }
        Ok(())
    }
    .await;
    progress.clear();
    read?;
    let counts = source.end().await?;
    let _ = pages.send(None).await;
    let rows = write.await.context("the writer stopped")??;
    Ok((rows, counts))
}

/// One line of progress, if the standard error is a terminal.
#[derive(Default)]
struct Progress {
    shown: Option<Instant>,
}

impl Progress {
    fn show(&mut self, bytes: u64) {
        let is_due = self.shown.is_none_or(|shown| shown.elapsed() >= PROGRESS_INTERVAL);
        if is_due && std::io::stderr().is_terminal() {
            self.shown = Some(Instant::now());
            eprint!("\r{:.1} MB written", bytes as f64 / 1e6);
            let _ = std::io::stderr().flush();
        }
    }

    fn clear(&self) {
        if self.shown.is_some() {
            eprint!("\r\x1b[K");
        }
    }
}

fn summary(written: &Written, counts: ExportCounts, bytes: u64, took: Duration) -> String {
    let ExportCounts { rollouts, filtered, unevaluated, purged, damaged } = counts;
    let noun = if rollouts == 1 { "rollout" } else { "rollouts" };
    let mut text = format!("{rollouts} {noun}: {written}, {bytes} bytes in {:.2} s", took.as_secs_f64());
    let left_out = [
        (filtered - unevaluated, "did not match"),
        (unevaluated, "on which --where cannot be evaluated"),
        (purged, "without a payload"),
        (damaged, "damaged"),
    ];
    let left_out = left_out.iter().filter(|(count, _)| *count > 0).map(|(count, why)| format!("{count} {why}"));
    let left_out: Vec<String> = left_out.collect();
    if !left_out.is_empty() {
        text.extend(["; rollouts left out: ", &left_out.join(", ")]);
    }
    text
}
