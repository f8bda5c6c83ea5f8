//! The command line. Each command is a function in [`commands`].

mod commands;

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use forebay::config::Config;

use self::commands::{bench, demo, export, import, keys, maintenance, score, serve, top, why};

/// musl's own allocator has one lock for all threads. Only programs that `make release` builds are linked with musl.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The durable rollout buffer between LLM agents and the trainers that learn from them.
#[derive(Parser)]
#[command(version, about, args_conflicts_with_subcommands = true)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: serve::ServeArgs,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the API (the default command)
    Serve(serve::ServeArgs),
    /// Watch agents and trainers at work, without anything else to install
    ///
    /// Starts a service of its own on a temporary database, plays a scripted team of agents whose calls are recorded in
    /// sessions, and trains two small policies. Prints the address of the page that shows it.
    Demo(demo::DemoArgs),
    /// Create, list and revoke keys
    Keys(keys::KeysArgs),
    /// Import recorded rollouts of other projects into a running service
    ///
    /// Prints a report for each file: how many rollouts were stored, were already there or were refused, and where. Exits
    /// 1 if anything was refused. An interrupted import is continued by the same command: nothing is stored twice.
    Import(Box<import::ImportArgs>),
    /// Check a configuration file: exits 0 if it is valid, otherwise 1 and lists every invalid value
    CheckConfig {
        /// Configuration file (TOML)
        file: PathBuf,
    },
    /// Make a consistent copy of a SQLite database, also while it is being served
    ///
    /// Prints the path of the copy. `forebay restore` replaces a database with such a copy. The payloads are in a folder
    /// beside it, `FILE-segments`: move both together.
    Backup {
        /// Path of the copy; the file must not exist
        file: PathBuf,
        /// An earlier copy: segment files that it has already are linked to it and not copied again
        #[arg(long, value_name = "COPY")]
        previous: Option<PathBuf>,
        #[command(flatten)]
        database: DatabaseArgs,
    },
    /// Replace a SQLite database with a copy; the database must not be served meanwhile
    ///
    /// Checks the copy and brings the schema of the restored database up to date; the copy itself is not changed. The
    /// previous database is kept beside the new one, with its write-ahead log, as `PATH.replaced-TIME`. Every policy
    /// begins a new epoch: running trainers are refused as superseded until they resume from the last step that they
    /// saved. Prints the path of the database. An interrupted restore can be run again.
    Restore {
        /// Path of the copy that `forebay backup` made
        file: PathBuf,
        #[command(flatten)]
        database: DatabaseArgs,
    },
    /// Move all payloads: into the database, into segment files beside a SQLite database, or into the object store of a
    /// Postgres database
    ///
    /// A service does the same for the kind that is configured, little by little. A SQLite database must not be served
    /// meanwhile. An interrupted command can be run again.
    MovePayloads {
        /// Where they are stored from now on
        kind: forebay_store::PayloadKind,
        /// URL of the object store, if the database does not record it yet
        #[arg(long, env = "FOREBAY_OBJECTS_URL", value_name = "URL")]
        objects_url: Option<String>,
        #[command(flatten)]
        database: DatabaseArgs,
    },
    /// Check a whole database for consistency: exits 0 if it is healthy, otherwise 1 and lists the problems
    ///
    /// Brings the schema up to date first, as `forebay serve` does. A SQLite database must not be served meanwhile. A
    /// copy made by `forebay backup` can be checked at any time.
    Doctor(DatabaseArgs),
    /// Write rollouts as a data set: Parquet, NDJSON, session traces, pairs of preferences, or trajectories
    ///
    /// Reads from a running service with a key of role `read`, or from a database, also while it is being served. Exits
    /// with 0 if the export is complete, with 3 if it was written without rollouts whose stored data is damaged, and
    /// otherwise with 1 and without a file.
    Export(Box<export::ExportArgs>),
    /// Say why a policy is as it is, or what became of a rollout, group, batch or session
    ///
    /// Asks a running service, which works it out of its ledger. Exits with 1 if nothing has this name or id.
    Why(why::WhyArgs),
    /// Score rollouts with a program: `forebay score --name tests -- ./grade.sh`
    ///
    /// Leases the work that the rules make of a score (`scores.work`), and runs the program once for each item. The program
    /// reads the rollout as JSON on its standard input; the last line that it prints is the score. Of a group, it reads all
    /// `rollouts`, and prints an array with a number for each. Another exit status than 0 is a failed attempt, whose reason is
    /// the last line of its standard error. Ends with a signal, once the programs that run have ended; a second signal kills
    /// them, and their work comes back when its leases expire.
    Score(Box<score::ScoreArgs>),
    /// Watch all policies in the terminal, the worst first
    ///
    /// Asks a running service every few seconds. Enter shows why the chosen policy is as it is, and q quits. With --once
    /// it prints the overview as plain text and exits.
    Top(top::TopArgs),
    /// Benchmark a service with simulated agents and trainers
    ///
    /// Runs the program `forebay-bench` with the same arguments. It is searched for in the folder of this program, then
    /// in PATH.
    #[command(disable_help_flag = true)]
    Bench {
        /// Arguments of `forebay-bench`; `--help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Print the OpenAPI document and exit
    Openapi,
}

#[derive(Args)]
struct DatabaseArgs {
    /// Configuration file (TOML) that names the database
    #[arg(long, env = "FOREBAY_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// `sqlite:PATH` or `postgres://...` [default: sqlite:data/forebay.db]
    #[arg(long, env = "FOREBAY_DATABASE", hide_env_values = true, value_name = "URL")]
    database: Option<String>,
}

impl DatabaseArgs {
    /// The database URL: the flag takes precedence over the environment, then the file, then the default.
    fn url(self) -> anyhow::Result<String> {
        let config = Config::load(self.config.as_deref()).context("the configuration cannot be used")?;
        Ok(self.database.unwrap_or_else(|| config.database.reveal().to_owned()))
    }
}

fn main() -> ExitCode {
    let command_line = CommandLine::parse();
    let outcome = match command_line.command {
        None => serve::serve(command_line.serve),
        Some(Command::Serve(args)) => serve::serve(args),
        Some(Command::Demo(args)) => demo::demo(&args),
        Some(Command::Keys(args)) => keys::keys(args),
        Some(Command::Import(args)) => import::import(*args),
        Some(Command::Why(args)) => why::why(&args),
        Some(Command::Score(args)) => wait_for(score::score(*args)),
        Some(Command::Top(args)) => top::top(&args),
        Some(Command::CheckConfig { file }) => check_config(&file),
        Some(Command::Backup { file, previous, database }) => {
            database.url().and_then(|url| maintenance::backup(&url, &file, previous.as_deref()))
        }
        Some(Command::Restore { file, database }) => {
            database.url().and_then(|url| wait_for(maintenance::restore(&url, &file)))
        }
        Some(Command::MovePayloads { kind, objects_url, database }) => {
            database.url().and_then(|url| wait_for(maintenance::move_payloads(&url, kind, objects_url)))
        }
        Some(Command::Doctor(database)) => database.url().and_then(|url| wait_for(maintenance::doctor(&url))),
        Some(Command::Export(args)) => wait_for(export::export(*args)),
        Some(Command::Bench { arguments }) => bench::bench(&arguments),
        Some(Command::Openapi) => print(&forebay_api::openapi()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("forebay: {error:#}");
            if error.is::<export::Incomplete>() { ExitCode::from(export::INCOMPLETE) } else { ExitCode::FAILURE }
        }
    }
}

/// Runs an asynchronous command on its own runtime.
fn wait_for(command: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Runtime::new().context("cannot start the async runtime")?.block_on(command)
}

fn check_config(file: &std::path::Path) -> anyhow::Result<()> {
    let config = Config::check(file).with_context(|| format!("{} cannot be used", file.display()))?;
    print(&format!("{}: ok, {} policies\n", file.display(), config.policies.len()))
}

fn print(text: &str) -> anyhow::Result<()> {
    use std::io::Write as _;
    match std::io::stdout().write_all(text.as_bytes()) {
        // If the reader of a pipe closes it early, as `head` does, that is not an error.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.context("cannot print"),
    }
}
