//! A whole group of OpenHands, from a failing test to a checkpoint: `make outside NAME=openhands`.
//!
//! It runs the commands of the section `A group, end to end` of `docs/connect.md` as they are printed, with the fake
//! engine in the place of a real one. The engine answers each rollout differently, so that two of four repair the file.

use std::{path::Path, process::Stdio, time::Duration};

use anyhow::{Context as _, ensure};
use forebay_fake_engine::FakeEngine;
use forebay_wire::{RolloutState, Verdict};
use serde_json::Value;
use tokio::process::Command;

use crate::{
    catalogue::{self, FILES, Step},
    process,
    service::{Mode, Service},
};

/// The name of this run among the names of clients.
pub(crate) const NAME: &str = "openhands_group";

const GUIDE: &str = "docs/connect.md";
const SECTION: &str = "\n## A group, end to end\n";

/// What the model writes in place of `a - b`, and whether the test passes then.
const REPAIRS: [(&str, bool); 4] = [("a + b", true), ("a * b", false), ("b + a", true), ("a - b - b", false)];

/// The longest time of a block of commands. It is far longer than any of them needs.
const PATIENCE: Duration = Duration::from_mins(15);

/// Runs everything, and says what became of it.
pub(crate) async fn run() -> anyhow::Result<String> {
    let folder = tempfile::tempdir()?;
    let work = folder.path().canonicalize()?;
    let [repository, tokenizer] = ["calc", "engine"].map(|name| work.join(name));
    for folder in [&repository, &tokenizer] {
        std::fs::create_dir(folder)?;
    }
    for (name, text) in FILES {
        std::fs::write(repository.join(name), text)?;
    }
    FakeEngine::write_model(&tokenizer)?;
    let data = tempfile::tempdir()?;
    let service = Service::start(data.path(), Mode::Observe).await?;
    for (place, (repair, _)) in REPAIRS.into_iter().enumerate() {
        // The task names the folder of the copy.
        let copy = work.join(format!("rollouts/calc-{place}"));
        let steps = catalogue::openhands_repair(&copy, repair);
        service.engine.script(&copy.display().to_string(), steps.iter().map(Step::answer));
    }

    let guide = std::fs::read_to_string(process::repository().join(GUIDE))?;
    let (_, section) = guide.split_once(SECTION).with_context(|| format!("{GUIDE} has the section"))?;
    let section = section.split("\n## ").next().unwrap_or_default();
    let blocks: Vec<&str> = section.split("\n```sh\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    let [play, train] = blocks.as_slice() else { anyhow::bail!("{GUIDE} has {} blocks of commands", blocks.len()) };

    let played = shell(play, &work, &service).await?;
    // The trainer's resume brings back what is leased here.
    let checked = service.check_batch().await? as u64;
    let trained = shell(train, &work, &service).await?;

    for (place, (_, passes)) in REPAIRS.into_iter().enumerate() {
        let story = service.client.story("default", &format!("calc-{place}")).await?.context("it is in the ledger")?;
        let reward = Some(f64::from(passes));
        ensure!((story.verdict, story.reward) == (Verdict::Kept, reward), "the test decides: {story:?}");
        let is_trained = (story.state, story.step) == (RolloutState::Checkpointed, Some(1)) && story.batches.len() == 1;
        ensure!(is_trained, "the rollout is in one batch, which step 1 trained: {story:?}");
    }
    let printed: Value = serde_json::from_str(trained.lines().last().context("the story is printed")?)?;
    ensure!(printed["step"] == 1, "{printed}");
    let metrics = std::fs::read_to_string(work.join("run/metrics.jsonl"))?;
    let report: Value = serde_json::from_str(&metrics)?;
    ensure!(report["trained_tokens"] == checked, "{checked} tokens are in the batch, and the step says {report}");
    let policy = service.client.policy("default").await?.context("the policy exists")?;
    let steps = (policy.version_step, policy.checkpoint_step);
    ensure!(steps == (Some(1), Some(1)), "a version and a checkpoint of step 1 are announced: {policy:?}");
    ensure!(trained.contains("start      step 1, from "), "the checkpoint is loaded again: {trained}");
    Ok(format!("{NAME}: a step was trained with {checked} tokens of this group\n{played}"))
}

/// Runs a block of commands in a folder, and returns its output.
async fn shell(block: &str, work: &Path, service: &Service) -> anyhow::Result<String> {
    let mut command = Command::new("bash");
    // Only the address of the service is replaced.
    let address = service.url.trim_start_matches("http://");
    let block = block.replace("localhost:8080", address);
    command
        .args(["-c", &format!("set -eu -o pipefail\n{block}")])
        .current_dir(work)
        .env("FOREBAY_SERVER", &service.url);
    let repository = process::repository();
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", repository.join("target/debug").display()));
    command.env("forebay", repository).env("model", work.join("engine"));
    command.env("FOREBAY_PYTHON", process::python312().await?);
    process::isolate(&mut command, work);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let output =
        tokio::time::timeout(PATIENCE, command.spawn()?.wait_with_output()).await.context("it does not end")??;
    let said = String::from_utf8(output.stdout)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the commands end with {}:\n{block}\n{said}{errors}", output.status);
    Ok(said)
}
