//! `forebay import`: reads recorded rollouts of other projects from files, and posts them to a running service.
//!
//! The files are read as streams, in chunks of bounded size. Rollouts have the same ids in every run, so an import that
//! was interrupted is continued by running it again.

mod post;
mod source;
mod text;

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::Args;
use forebay_formats::{Format, GroupSizes, Importer, Options, Record};
use forebay_wire::{ImportReport, Trajectory};

use self::{
    post::{Chunk, Poster},
    source::Source,
    text::Progress,
};
use super::{media::MediaFolder, service::ServiceArgs, text::shown};

/// The arguments of `forebay import`.
#[derive(Args)]
pub(crate) struct ImportArgs {
    /// Format of the files: atif, chat, forebay, nemo-gym or verifiers
    #[arg(long, value_parser = format, value_name = "FORMAT")]
    format: &'static Format,
    /// Files to import, also compressed as .gz or .zst; `-` is the standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Import also groups that have more rollouts in the files than --group-size says. The service stores the others as
    /// late, without their tokens and messages
    #[arg(long, requires = "group_size")]
    allow_late: bool,
    /// Print one report per file as JSON, one per line
    #[arg(long)]
    json: bool,
    /// Folder with the images that messages name, as `forebay export --media` writes it. They are uploaded first
    #[arg(long, value_name = "FOLDER")]
    media: Option<PathBuf>,
    /// How long to wait in total while the service has no room, in seconds
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    patience_s: u64,
    #[command(flatten)]
    labels: LabelArgs,
    #[command(flatten)]
    service: ServiceArgs,
}

/// What is said about all rollouts. It takes precedence over what the files say.
#[derive(Args)]
#[command(next_help_heading = "Labels of all rollouts")]
struct LabelArgs {
    /// Policy; in the format `verifiers`, `{agent}` stands for the name of a trace's agent
    #[arg(long, value_name = "POLICY")]
    policy: Option<String>,
    /// Label of the environment
    #[arg(long, value_name = "LABEL")]
    environment: Option<String>,
    /// Size of the groups
    #[arg(long, value_name = "N")]
    group_size: Option<u32>,
    /// Weight version that generated the rollouts
    #[arg(long, value_name = "VERSION")]
    policy_version: Option<i64>,
    /// Text before every group id and rollout id, for files whose ids count from 0
    #[arg(long, value_name = "TEXT")]
    prefix: Option<String>,
    /// JSON pointer to the reward in a record, e.g. /extra/score
    #[arg(long, value_name = "POINTER")]
    reward_at: Option<String>,
    /// JSON pointer to the group id in a record
    #[arg(long, value_name = "POINTER")]
    group_at: Option<String>,
    /// JSON pointer to the rollout id in a record
    #[arg(long, value_name = "POINTER")]
    rollout_at: Option<String>,
}

fn format(name: &str) -> Result<&'static Format, String> {
    forebay_formats::format(name).ok_or_else(|| format!("must be one of {}", forebay_formats::names()))
}

/// Imports the files, and prints a report for each. It is an error if anything was refused.
#[tokio::main(flavor = "current_thread")]
pub(crate) async fn import(args: ImportArgs) -> anyhow::Result<()> {
    let options = args.labels.options()?;
    let poster = Poster::new(args.service, std::time::Duration::from_secs(args.patience_s))?;
    if options.group_size.is_some() && !args.allow_late {
        check_groups(&args.files, args.format, &options)?;
    }
    let mut media = args.media.as_deref().map(MediaFolder::open);
    let mut refused = 0;
    for file in &args.files {
        let mut report = ImportReport { file: Some(file.display().to_string()), ..ImportReport::new(args.format.name) };
        let outcome = import_file(file, args.format, &options, &poster, media.as_mut(), &mut report).await;
        refused += report.refused;
        crate::print(&if args.json { text::json(&report) } else { text::report(&report) })?;
        outcome.with_context(|| {
            format!("{} is not imported completely; run the same command again to continue", file.display())
        })?;
    }
    match refused {
        0 => Ok(()),
        1 => bail!("1 document or rollout was refused"),
        _ => bail!("{refused} documents or rollouts were refused"),
    }
}

impl LabelArgs {
    fn options(self) -> anyhow::Result<Options> {
        let Self { policy, environment, group_size, policy_version, prefix, reward_at, group_at, rollout_at } = self;
        let options = Options {
            policy,
            environment,
            group_size,
            policy_version,
            prefix,
            reward_at,
            group_at,
            rollout_at,
            ..Options::default()
        };
        options.check().map_err(|(name, why)| anyhow::anyhow!("--{}: {why}", name.replace('_', "-")))?;
        Ok(options)
    }
}

/// Checks before anything is stored that no group has more rollouts in all files than places. What comes from a pipe
/// cannot be read twice, so it is not counted.
fn check_groups(files: &[PathBuf], format: &Format, options: &Options) -> anyhow::Result<()> {
    let mut sizes = GroupSizes::default();
    for file in files.iter().filter(|file| file.is_file()) {
        let importer = Importer::new(format, options, Source::open(file)?);
        sizes.read(importer).with_context(|| format!("cannot read {}", file.display()))?;
    }
    let Some(overfull) = sizes.overfull() else { return Ok(()) };
    let what = shown(&overfull.to_string());
    bail!(
        "{what}. Nothing is imported. Use --group-size {}, or --allow-late to import the files like this",
        overfull.rollouts
    )
}

async fn import_file(
    file: &std::path::Path,
    format: &Format,
    options: &Options,
    poster: &Poster,
    mut media: Option<&mut MediaFolder>,
    report: &mut ImportReport,
) -> anyhow::Result<()> {
    let source = Source::open(file)?;
    let mut progress = Progress::new(file, source.position());
    let mut importer = Importer::new(format, options, source);
    let mut chunk = Chunk::default();
    while let Some(record) = importer.next_record().with_context(|| format!("cannot read {}", file.display()))? {
        for (line, trajectory) in count(record, report) {
            if let Some(folder) = &mut media {
                poster.upload_named(folder, &trajectory).await?;
            }
            if !chunk.has_room(&trajectory) {
                poster.post(std::mem::take(&mut chunk), report).await?;
            }
            chunk.push(line, trajectory);
        }
        progress.show(report);
    }
    poster.post(chunk, report).await
}

/// Counts a record, and returns its rollouts with its line.
fn count(record: Record, report: &mut ImportReport) -> Vec<(u64, Trajectory)> {
    match record.outcome {
        Err(violations) => {
            report.refuse_document(record.line, violations);
            Vec::new()
        }
        Ok(imported) => {
            let notes = imported.notes.iter().map(|(note, times)| (note.as_str(), *times));
            report.read_document(imported.trajectories.len(), notes);
            imported.trajectories.into_iter().map(|trajectory| (record.line, trajectory)).collect()
        }
    }
}
