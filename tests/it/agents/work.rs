//! Long work on the bytes of agents, which must not hold up the other tasks of the service.

use std::{thread, time::Duration};

use forebay_fake_engine::{EngineKind, FakeEngine};
use forebay_gateway::{Request, canonical::Canonical};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tokio::{runtime, sync::oneshot};

use super::{Agent, Dialect, success};
use crate::support::{Backend, TestApp};

/// Values of the largest parts of a call.
const VALUES: usize = 200_000;

fn runtime() -> runtime::Runtime {
    runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime starts")
}

/// The time for which this thread has had a core. Unlike a clock, it does not depend on what else the machine does.
fn core_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().expect("a time of a thread is not negative")
}

/// The longest time for which other tasks had the thread between two turns of this task, which always wants one.
async fn longest_wait(mut until: oneshot::Receiver<()>) -> Duration {
    let turn = || (thread::current().id(), core_time());
    let (mut longest, mut last) = (Duration::ZERO, turn());
    while until.try_recv() == Err(oneshot::error::TryRecvError::Empty) {
        tokio::task::yield_now().await;
        let now = turn();
        if now.0 == last.0 {
            longest = longest.max(now.1.saturating_sub(last.1));
        }
        last = now;
    }
    longest
}

/// A call whose tool has a large schema, and whose conversation has a call of it with large arguments.
fn large() -> Value {
    let arguments = json!({"a": vec![0; VALUES]}).to_string();
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}});
    let parameters = json!({"type": "object", "properties": {"a": {"default": vec![0; VALUES]}}});
    json!({
        "model": "m",
        "messages": [
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "done"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
    })
}

#[test]
fn other_tasks_go_on_while_a_large_call_is_worked_on() {
    let body = large();
    let began = core_time();
    let parsed = forebay_gateway::Dialect::Chat.parse(body.to_string().as_bytes()).and_then(Request::recorded);
    drop(Canonical::of(&parsed.expect("the call is accepted")));
    let work = core_time().saturating_sub(began);

    // All tasks of the service take turns on one thread. The engine has another one.
    let (of_engine, of_service) = (runtime(), runtime());
    let engine = of_engine.block_on(FakeEngine::start(EngineKind::Sglang));
    engine.switch(|switches| switches.context_tokens = 10_000_000);
    let config = format!("[[upstream]]\nname = 'other'\nkind = 'sglang'\nurls = ['{}']\n", engine.url());
    of_service.block_on(async {
        let app = TestApp::start_with(Backend::Sqlite, &config).await;
        let agent = Agent::open(&app, json!({})).await;
        let (ends, ended) = oneshot::channel();
        let waits = tokio::spawn(longest_wait(ended));
        success(agent.call(Dialect::Chat, &body).await).await;
        ends.send(()).expect("the task goes on");
        let longest = waits.await.expect("the task goes on");
        assert!(longest < work, "a task waited for {longest:?}, and reading the call takes {work:?}");
        app.finish().await;
    });
}
