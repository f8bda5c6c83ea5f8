//! The program `forebay-bench`, which `forebay bench` starts.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use forebay_bench::BenchArgs;

fn main() -> ExitCode {
    let args = BenchArgs::parse();
    let outcome = tokio::runtime::Runtime::new()
        .context("the runtime does not start")
        .and_then(|runtime| runtime.block_on(forebay_bench::run(args, &mut std::io::stdout())));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("forebay-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
