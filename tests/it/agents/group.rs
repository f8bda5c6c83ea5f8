//! `examples/group.py` with agents that are a few lines of shell.

use std::{fs::Permissions, os::unix::fs::PermissionsExt as _, path::Path, process::Output};

use serde_json::{Value, json};
use tokio::process::Command;

use super::trained;
use crate::support::{Backend, TestApp};

const CALC: &str = "def add(a, b):\n    return a - b\n";
const TEST: &str = "from calc import add\n\nassert add(2, 3) == 5\n";

/// Makes a call, and then does what the name of its folder says: the first repairs the file, the second fails when it
/// runs for the first time, and the third changes the test.
const AGENT: &str = r#"#!/bin/sh
set -eu
[ -z "${FOREBAY_KEY:-}" ]
curl --silent --fail "$OPENAI_BASE_URL/chat/completions" -H "authorization: Bearer $OPENAI_API_KEY" \
  -H 'content-type: application/json' -d '{"model": "any", "messages": [{"role": "user", "content": "'"$1"'"}]}'
case $PWD in
  */g-0) sed -i.before 's/a - b/a + b/' calc.py ;;
  */g-1) exit 3 ;;
  */g-2) echo 'print("passed")' > test_calc.py ;;
esac
"#;

/// Runs the program on a repository, with this agent.
async fn play(app: &TestApp, folder: &Path, agent: &str, options: &[&str]) -> Output {
    std::fs::create_dir_all(folder.join("calc")).expect("the folder can be written");
    for (name, text) in [("calc/calc.py", CALC), ("calc/test_calc.py", TEST), ("agent", agent)] {
        std::fs::write(folder.join(name), text).expect("the folder can be written");
    }
    // The agent runs in its copy of the repository.
    let agent = folder.join("agent");
    std::fs::set_permissions(&agent, Permissions::from_mode(0o755)).expect("it is our file");
    let mut command = Command::new("python3");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/group.py"));
    command.args(["calc", "--server", &app.url, "--group-id", "g", "--protect", "test_calc.py"]);
    command.args(options);
    command.args(["--task", "Repair {folder}.", "--test", "python3 test_calc.py", "--"]).arg(&agent).arg("{task}");
    command.current_dir(folder).env("FOREBAY_KEY", "the producer's").kill_on_drop(true);
    command.output().await.expect("there is Python")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_test_decides_about_each_rollout_of_a_group_and_a_failed_agent_is_replaced() {
    let app = TestApp::start(Backend::Sqlite).await;
    app.rules("default", json!({"group": {"size": 4}})).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let output = play(&app, folder.path(), AGENT, &[]).await;
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("g: 4 rollouts, mean reward 0.25"), "{said}");
    for (rollout, reward) in [("g-0", 1.0), ("g-1-retry1", 0.0), ("g-2", 0.0), ("g-3", 0.0)] {
        let story = app.story(rollout).await;
        assert_eq!((&story["verdict"], &story["reward"]), (&json!("kept"), &json!(reward)), "{story}");
    }
    let failed = app.story("g-1").await;
    assert_eq!((&failed["verdict"], &failed["reward"]), (&json!("dropped"), &Value::Null), "{failed}");
    // Each agent was told its own folder.
    let log = app.engine.log();
    let told = |place: usize| log.calls().any(|call| call.text.contains(&format!("rollouts/g-{place}.")));
    assert!((0..4).all(told));
    assert_eq!(trained(&app).await.0.len(), 4);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_whose_agents_all_fail_has_no_rewards() {
    let app = TestApp::start(Backend::Sqlite).await;
    app.rules("default", json!({"group": {"size": 2}})).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let output = play(&app, folder.path(), "#!/bin/sh\nexit 3\n", &[]).await;
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("g-1-retry2: the agent failed with status 3"), "{error}");
    assert!(error.contains("2 rollouts of g failed"), "{error}");
    let open = app.get("/sessions?policy=default&state=open").await.expect(200);
    assert_eq!(open["sessions"], json!([]));
    app.finish().await;
}

/// Makes a call and dies when it runs for the first time. Then it makes the same call, and repairs the file.
const DYING: &str = r#"#!/bin/sh
set -eu
curl --silent --fail "$OPENAI_BASE_URL/chat/completions" -H "authorization: Bearer $OPENAI_API_KEY" \
  -H 'content-type: application/json' -d '{"model": "any", "messages": [{"role": "user", "content": "'"$1"'"}]}'
mkdir "$PWD.died" && exit 3
[ ! -e calc.py.before ]
sed -i.before 's/a - b/a + b/' calc.py
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_died_is_started_again_in_its_session() {
    let app = TestApp::start(Backend::Sqlite).await;
    app.rules("default", json!({"group": {"size": 2}})).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let output = play(&app, folder.path(), DYING, &["--resume"]).await;
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("g-1: reward 1, completed, attempt 2, 1 calls"), "{said}");
    let asked = || app.engine.log().calls().filter(|call| call.text.contains("Repair")).count();
    assert_eq!(asked(), 2, "an engine was asked once by each rollout");
    // The program was interrupted before it knew that all is done.
    let again = play(&app, folder.path(), DYING, &["--resume"]).await;
    let said = String::from_utf8_lossy(&again.stdout);
    assert!(said.contains("g: 2 rollouts, mean reward 1.00"), "{said}{}", String::from_utf8_lossy(&again.stderr));
    assert_eq!(asked(), 2);
    assert_eq!(trained(&app).await.0.len(), 2);
    app.finish().await;
}
