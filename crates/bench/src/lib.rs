//! The load generator of `forebay bench`: sends the load of agents and trainers to a service, to measure a machine and
//! to compare services.
//!
//! This is a separate crate, so that the service does not contain it. It uses only HTTP, so it can load any service
//! that has one of its protocols. In reading order: `workload` draws groups, a `protocol` writes them as `template`s,
//! `load` posts them to the `target` and takes batches, `tally` counts, and `progress` and `report` print. `wake`
//! measures how soon a waiting trainer gets its batch, and `drain` measures the ceiling.

mod workload;

mod protocol;
mod template;

mod load;
mod target;

mod progress;
mod report;
mod tally;

mod drain;
mod wake;

use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use clap::{Args, Parser};
use forebay_client::{ClientOptions, wire::ApiKey};

use self::{
    load::{Load, Run},
    protocol::{Format, Protocol, ProtocolName, atropos::Atropos, forebay::Forebay, slime::Slime},
    report::{LoadOutcome, Outcome, Report},
    tally::{Tally, Window},
    target::Target,
    template::Bodies,
    wake::Rounds,
    workload::{PerBody, WorkloadArgs, number},
};

/// Longest run: a day.
const SECONDS_MAX: f64 = 86_400.0;

/// Send the load of agents and trainers to a service, and measure its throughput and latencies
///
/// Producers post groups of rollouts with realistic lengths, in a closed loop (as fast as they are answered) or in an
/// open loop (`--rate`). Trainers take batches at the same time. The service is a running forebay, or a service with
/// the protocol of slime's rollout buffer or of an Atropos server. The result is a table, and with `--json` also a JSON
/// document.
#[derive(Parser)]
#[command(name = "forebay-bench", version)]
pub struct BenchArgs {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    trainers: TrainerArgs,
    #[command(flatten)]
    workload: WorkloadArgs,
    /// Also write the result as JSON to this file; `-` writes it to standard output instead of the table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Args)]
#[command(next_help_heading = "Service")]
struct TargetArgs {
    /// Protocol of the service
    #[arg(long, value_enum, default_value_t = ProtocolName::Forebay)]
    protocol: ProtocolName,
    /// URL of the running service [default: port 8080 of this machine; 8889 for slime, 8000 for atropos]
    #[arg(long, env = "FOREBAY_URL", value_name = "URL")]
    url: Option<String>,
    /// An admin's key for the running service; prefer the environment variable, because `ps` shows arguments
    #[arg(long, env = "FOREBAY_KEY", hide_env_values = true, value_name = "KEY")]
    key: Option<ApiKey>,
    /// Certificate (PEM) to trust instead of the system's: the service's own, or that of the authority that signed it
    #[arg(long, env = "FOREBAY_CA", value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Certificate and private key (PEM), for a service that requires client certificates
    #[arg(long, env = "FOREBAY_IDENTITY", value_name = "FILE")]
    identity: Option<PathBuf>,
    /// Use no service: read the bodies in this process and discard them, to measure the ceiling of this machine
    #[arg(long, conflicts_with_all = ["trainers", "wake", "reset"])]
    drain_only: bool,
    /// Policy that is used (forebay); its rules are overwritten, so its name must begin with `bench`
    #[arg(long, default_value = "bench", value_parser = policy_name, value_name = "NAME")]
    policy: String,
    /// Format of trajectories and samples (forebay)
    #[arg(long, value_enum, default_value_t = Format::Json, value_name = "FORMAT")]
    format: Format,
    /// First discard the contents of the policy from earlier runs (forebay)
    #[arg(long)]
    reset: bool,
}

#[derive(Args)]
#[command(next_help_heading = "Load")]
struct LoadArgs {
    /// Number of agents that post at the same time; 0 if only trainers use the service
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(..=10_000), value_name = "N")]
    connections: u16,
    /// Bodies per second that are due, even if the service is slower; a latency begins when its body was due.
    /// If absent, each connection posts again as soon as it is answered
    #[arg(long, value_parser = number(0.001, 1e6), value_name = "R")]
    rate: Option<f64>,
    /// Seconds to measure
    #[arg(long, default_value_t = 10.0, value_parser = number(0.1, SECONDS_MAX), value_name = "S")]
    duration: f64,
    /// Seconds of load before the measurement
    #[arg(long, default_value_t = 2.0, value_parser = number(0.0, SECONDS_MAX), value_name = "S")]
    warmup: f64,
    /// Post this number of bodies and measure all of them
    #[arg(long, conflicts_with_all = ["duration", "warmup"], value_parser = clap::value_parser!(u64).range(1..), value_name = "N")]
    bodies: Option<u64>,
}

#[derive(Args)]
#[command(next_help_heading = "Trainers")]
struct TrainerArgs {
    /// Number of trainers that take batches at the same time: lease, read, ack (forebay), or poll (slime, atropos)
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(..=1_000), value_name = "N")]
    trainers: u16,
    /// Number of groups of a batch (forebay, atropos)
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4_096), value_name = "N")]
    batch_groups: u32,
    /// Instead of load, post one group at a time and measure how soon a waiting trainer has its batch (forebay)
    ///
    /// The contents of the policy are discarded first. With `--bodies`, the measurement ends after this many groups.
    #[arg(long, conflicts_with_all = ["trainers", "rate", "batch_groups"])]
    wake: bool,
}

/// Measures, and writes the result to `out`.
pub async fn run(args: BenchArgs, out: &mut (dyn Write + Send)) -> anyhow::Result<()> {
    check(&args)?;
    let url = match (args.target.drain_only, &args.target.url) {
        (true, _) => drain::start().await.context("no port can be listened on")?,
        (false, Some(url)) => url.clone(),
        (false, None) => args.target.protocol.usual_url().to_owned(),
    };
    let target = Target::new(&url, args.target.protocol, args.target.options()?)?;
    let report = if args.trainers.wake { measure_wake(&args, target).await? } else { load(&args, target).await? };
    match args.json.as_deref() {
        Some(path) if path == Path::new("-") => print(&report.json(), out),
        Some(path) => {
            std::fs::write(path, report.json()).with_context(|| format!("{} cannot be written", path.display()))?;
            print(&report.table(), out)
        }
        None => print(&report.table(), out),
    }
}

fn print(text: &str, out: &mut (dyn Write + Send)) -> anyhow::Result<()> {
    match out.write_all(text.as_bytes()) {
        // It is not an error if the reader of the output closes it early.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.context("cannot print"),
    }
}

/// Refuses combinations of options that make no sense.
fn check(args: &BenchArgs) -> anyhow::Result<()> {
    let protocol = args.target.protocol;
    if args.load.connections == 0 && (args.trainers.trainers == 0 || args.load.bodies.is_some()) {
        bail!("--connections 0 needs --trainers, and cannot be combined with --bodies");
    }
    if args.workload.text.is_some() && protocol == ProtocolName::Atropos {
        bail!("--text cannot be used with Atropos, which accepts only tokens");
    }
    if args.trainers.wake && (protocol != ProtocolName::Forebay || args.workload.per_body != PerBody::Group) {
        bail!("--wake needs --protocol forebay and whole groups: trainers of other services cannot wait for a batch");
    }
    let posts_whole_tokens = args.workload.per_body == PerBody::Group && args.workload.text.is_none();
    if args.target.format == Format::Arrow && !(protocol == ProtocolName::Forebay && posts_whole_tokens) {
        bail!("--format arrow needs --protocol forebay and whole groups of tokens");
    }
    Ok(())
}

async fn load(args: &BenchArgs, target: Target) -> anyhow::Result<Report> {
    let mut protocol = protocol(args, &target)?;
    if !args.target.drain_only {
        protocol.prepare().await?;
    }
    let bodies = Bodies::new(&args.workload, &*protocol);
    let summary = bodies.summary();
    let load = Load {
        connections: args.load.connections.into(),
        trainers: args.trainers.trainers.into(),
        rate: args.load.rate,
        bodies_max: args.load.bodies,
    };
    let start = Instant::now();
    let from = start + args.load.warmup();
    let until = args.load.bodies.is_none().then(|| from + args.load.duration());
    let run = Run::new(load, target, protocol.into(), bodies, Tally::new(Window { start, from, until }));
    run.finish().await?;
    Ok(report(args, &run.target, summary, Outcome::Load(Box::new(LoadOutcome::of(&run)))))
}

async fn measure_wake(args: &BenchArgs, target: Target) -> anyhow::Result<Report> {
    let mut forebay = forebay(args, &target, 1)?.fresh();
    forebay.prepare().await?;
    let bodies = Bodies::new(&args.workload, &forebay);
    let rounds = Rounds { warmup: args.load.warmup(), duration: args.load.duration(), most: args.load.bodies };
    let wake = wake::measure(Arc::new(forebay), &target, &bodies, &rounds).await?;
    Ok(report(args, &target, bodies.summary(), Outcome::Wake { wake }))
}

fn protocol(args: &BenchArgs, target: &Target) -> anyhow::Result<Box<dyn Protocol>> {
    let (group_size, batch_groups) = (args.workload.group_size, args.trainers.batch_groups);
    Ok(match args.target.protocol {
        ProtocolName::Forebay => Box::new(forebay(args, target, batch_groups)?),
        ProtocolName::Slime => Box::new(Slime::new(target.clone(), group_size)),
        ProtocolName::Atropos => Box::new(Atropos::new(target.clone(), group_size, batch_groups)),
    })
}

fn forebay(args: &BenchArgs, target: &Target, batch_groups: u32) -> anyhow::Result<Forebay> {
    let policy = args.target.policy.clone();
    let forebay = Forebay::new(target.clone(), policy, args.workload.group_size, batch_groups)?;
    let forebay = forebay.in_format(args.target.format);
    let forebay = if args.workload.text.is_some() { forebay.of_text() } else { forebay };
    Ok(if args.target.reset { forebay.fresh() } else { forebay })
}

fn report(args: &BenchArgs, target: &Target, bodies: template::BodySummary, outcome: Outcome) -> Report {
    Report {
        generator: concat!("forebay ", env!("CARGO_PKG_VERSION")),
        protocol: args.target.protocol,
        format: args.target.format,
        url: (!args.target.drain_only).then(|| target.url.clone()),
        workload: args.workload.clone(),
        bodies,
        unit: if args.workload.text.is_some() { "words" } else { "tokens" },
        connections: if args.trainers.wake { 1 } else { args.load.connections.into() },
        trainers: if args.trainers.wake { 1 } else { args.trainers.trainers.into() },
        rate: args.load.rate,
        warmup_s: args.load.warmup().as_secs_f64(),
        outcome,
    }
}

impl TargetArgs {
    fn options(&self) -> anyhow::Result<ClientOptions> {
        let read = |file: &PathBuf| std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()));
        Ok(ClientOptions {
            key: self.key.clone(),
            ca_pem: self.ca.as_ref().map(read).transpose()?,
            identity_pem: self.identity.as_ref().map(read).transpose()?,
            ..ClientOptions::default()
        })
    }
}

impl LoadArgs {
    /// The warm-up of the run. With `--bodies` there is none: all bodies are measured.
    fn warmup(&self) -> Duration {
        if self.bodies.is_some() { Duration::ZERO } else { Duration::from_secs_f64(self.warmup) }
    }

    fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.duration)
    }
}

/// Parses the name of a policy. The prefix protects real policies, whose rules would be overwritten.
fn policy_name(name: &str) -> Result<String, String> {
    if name.starts_with("bench") { Ok(name.to_owned()) } else { Err("must begin with `bench`".to_owned()) }
}
