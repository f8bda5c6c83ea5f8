//! The command line, the configuration and the log; then the command runs.

use std::{
    io::IsTerminal as _,
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use forebay_trainer::{
    bench::{BenchArgs, bench},
    config::{DeviceConfig, TrainConfig},
    report::LogWriter,
    rollout::{InitArgs, RolloutArgs, init, rollout},
    serve::{ServeArgs, serve},
    service::Credentials,
    train::{dry_run, train},
};
use tracing_subscriber::EnvFilter;

/// Trains language models on the batches of a Forebay buffer, on one device.
#[derive(Parser)]
#[command(version, about, arg_required_else_help = true)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
    /// Format of the log
    #[arg(long, global = true, env = "FOREBAY_TRAINER_LOG", value_name = "FORMAT", default_value = "text")]
    log: LogFormat,
}

#[derive(Subcommand)]
enum Command {
    /// Lease batches, learn, publish weights
    Train(TrainArgs),
    /// Play a task with the newest published weights and post the trajectories
    Rollout(RolloutArgs),
    /// Serve models to agents as an inference engine; for tests, examples and single machines
    Serve(ServeArgs),
    /// Write a small checkpoint with random weights, to start a demonstration from
    Init(InitArgs),
    /// Measure training steps on this machine, without a service
    Bench(BenchArgs),
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum LogFormat {
    /// Text for people
    Text,
    /// One JSON object per line
    Json,
}

#[derive(Args)]
struct TrainArgs {
    /// Configuration file (TOML); `configs/trainer.toml` explains every key
    #[arg(long, env = "FOREBAY_TRAINER_CONFIG", value_name = "FILE")]
    config: PathBuf,
    /// URL of the service; overrides `server` of the file
    #[arg(long, env = "FOREBAY_SERVER", value_name = "URL")]
    server: Option<String>,
    #[command(flatten)]
    credentials: Credentials,
    /// Policy to train; overrides `policy` of the file
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    /// Checkpoint to start from; overrides `model` of the file
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// Total number of optimizer steps; overrides `steps` of the file
    #[arg(long, value_name = "N")]
    steps: Option<i64>,
    /// Folder of checkpoints, versions and metrics; overrides `output` of the file
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Device of the tensors; overrides `device` of the file
    #[arg(long)]
    device: Option<DeviceConfig>,
    /// Continue even if the service has settled steps that are missing in the last checkpoint here
    #[arg(long)]
    force: bool,
    /// Load everything, lease nothing, and print what a run would do
    #[arg(long)]
    dry_run: bool,
}

fn main() -> ExitCode {
    let command_line = CommandLine::parse();
    start_log(command_line.log);
    let outcome = match command_line.command {
        Command::Train(args) => run_train(args),
        Command::Rollout(args) => run_rollout(&args),
        Command::Serve(args) => run_serve(&args),
        Command::Bench(args) => run_bench(&args),
        Command::Init(args) => init(&args).map_err(anyhow::Error::from),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("forebay-trainer: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_train(args: TrainArgs) -> anyhow::Result<()> {
    let mut config = TrainConfig::read(&args.config)?;
    config.server = args.server.unwrap_or(config.server);
    config.credentials = args.credentials.or(config.credentials);
    config.policy = args.policy.unwrap_or(config.policy);
    config.model = args.model.unwrap_or(config.model);
    config.steps = args.steps.unwrap_or(config.steps);
    config.output = args.output.unwrap_or(config.output);
    config.device = args.device.unwrap_or(config.device);
    if args.dry_run {
        use std::io::Write as _;
        return write!(std::io::stdout(), "{}", dry_run(&config)?).context("cannot print");
    }
    let stop = stop_flag()?;
    Ok(train(&config, args.force, &|| stop.load(Ordering::Relaxed))?)
}

fn run_rollout(args: &RolloutArgs) -> anyhow::Result<()> {
    let stop = stop_flag()?;
    let tally = rollout(args, &|| stop.load(Ordering::Relaxed))?;
    tracing::info!(?tally, "stopped");
    Ok(())
}

fn run_serve(args: &ServeArgs) -> anyhow::Result<()> {
    let stop = stop_flag()?;
    Ok(serve(args, &|| stop.load(Ordering::Relaxed))?)
}

fn run_bench(args: &BenchArgs) -> anyhow::Result<()> {
    use std::io::Write as _;
    let measured = bench(args)?;
    writeln!(std::io::stdout(), "{}", serde_json::to_string(&measured)?).context("cannot print")
}

/// Returns a flag that SIGINT and SIGTERM set. The second signal ends the process at once.
fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // The order matters: the first signal finds the flag unset and sets it, the second finds it set and ends the
        // process.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
            .context("cannot listen for signals")?;
    }
    Ok(stop)
}

fn start_log(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(LogWriter::default);
    // No colours if the log goes to a file, or if NO_COLOR is set.
    let is_colourful = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty());
    match format {
        LogFormat::Text => log.with_target(false).with_ansi(is_colourful).init(),
        LogFormat::Json => log.json().flatten_event(true).with_ansi(false).init(),
    }
}
