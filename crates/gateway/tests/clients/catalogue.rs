//! The clients: how each one is started, and what the model answers it.

use std::path::Path;

use forebay_fake_engine::Answer;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::Course;

/// What every client is asked to do.
pub(crate) const TASK: &str = "The test in test_calc.py fails. Fix calc.py, then run python3 test_calc.py.";

/// The files of the task.
pub(crate) const FILES: [(&str, &str); 2] = [
    ("calc.py", "def add(a, b):\n    return a - b\n"),
    ("test_calc.py", "from calc import add\n\nassert add(2, 3) == 5\nprint(\"passed\")\n"),
];

/// The repaired `calc.py`.
const FIXED: &str = "def add(a, b):\n    return a + b\n";
const TEST: &str = "python3 test_calc.py";

/// What a client needs to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    /// The environment of `tests/python/NAME.txt`.
    Python(&'static str),
    /// The same with Python 3.12 or newer.
    Python312(&'static str),
    /// The programs of `tests/clients/package.json`.
    Node,
}

/// One client, and one way to use it.
#[derive(Debug)]
pub(crate) struct Client {
    /// The name of its file in `tests/clients` without the extension, and of its recording.
    pub(crate) name: &'static str,
    pub(crate) needs: Needs,
    /// The package whose version is printed.
    pub(crate) package: &'static str,
    /// Whether its base URL ends before `/v1`.
    pub(crate) is_anthropic: bool,
    steps: fn(&Path) -> Vec<Step>,
    /// A client that sends each call as a conversation of its own: what occurs in its second call and the later ones.
    stateless: &'static [&'static str],
    /// What else it goes through.
    pub(crate) courses: &'static [Course],
    /// Whether it says of a call that it repeats it.
    pub(crate) counts_repeats: bool,
}

/// One answer of the model.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Step {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    content: String,
    /// Names and arguments. The arguments are JSON in the spelling of Python, which models write.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    calls: Vec<(String, String)>,
}

impl Step {
    fn say(text: &str) -> Self {
        Self { content: text.to_owned(), ..Self::default() }
    }

    fn call(name: &str, arguments: &str) -> Self {
        Self { calls: vec![(name.to_owned(), arguments.to_owned())], ..Self::default() }
    }

    pub(crate) fn answer(&self) -> Answer {
        let answer =
            self.calls.iter().fold(Answer::text(&self.content), |answer, (name, text)| answer.call(name, text));
        match &self.reasoning {
            Some(reasoning) => answer.thinking(reasoning),
            None => answer,
        }
    }
}

impl Client {
    /// What the model answers in this folder, with reasoning or without.
    pub(crate) fn steps(&self, folder: &Path, thinks: bool) -> Vec<Step> {
        let mut steps = (self.steps)(folder);
        for (step, reasoning) in steps.iter_mut().zip(["The sign is wrong.", "Now the test.", "That was all."]) {
            step.reasoning = thinks.then(|| reasoning.to_owned());
        }
        steps
    }
}

/// What a script begins with: a text in a message of the user. The task of all clients, and the call in which opencode
/// asks for a title.
pub(crate) const TASK_KEY: &str = "Fix calc.py";
pub(crate) const TITLE_KEY: &str = "Generate a title";

/// What opencode is answered when it asks for a title.
pub(crate) fn title() -> Vec<Step> {
    vec![Step::say("Wrong sign in calc.py")]
}

/// The answers of a client by the text that leads to them.
pub(crate) fn scripts(client: &Client, steps: &[Step]) -> Vec<(String, Vec<Step>)> {
    let mut scripts = vec![(TASK_KEY.to_owned(), steps.to_vec()), (TITLE_KEY.to_owned(), title())];
    for (key, step) in client.stateless.iter().zip(steps.iter().skip(1)) {
        scripts.push(((*key).to_owned(), vec![step.clone()]));
    }
    scripts
}

/// All clients, in the order of the table.
pub(crate) const CLIENTS: &[Client] = &[
    Client { name: "openai_chat", package: "openai", ..OF_PYTHON },
    Client { name: "openai_stream", package: "openai", ..OF_PYTHON },
    Client { name: "openai_responses", package: "openai", ..OF_PYTHON },
    Client { name: "anthropic_messages", package: "anthropic", is_anthropic: true, ..OF_PYTHON },
    Client { name: "anthropic_stream", package: "anthropic", is_anthropic: true, ..OF_PYTHON },
    Client { name: "openai_agents", package: "openai-agents", ..OF_PYTHON },
    Client { name: "openai_agents_chat", package: "openai-agents", ..OF_PYTHON },
    Client { name: "langgraph_agent", package: "langgraph", needs: Needs::Python("client-langgraph"), ..OF_PYTHON },
    Client {
        name: "smolagents_tools",
        package: "smolagents",
        needs: Needs::Python("client-smolagents"),
        steps: smolagents,
        ..OF_PYTHON
    },
    Client {
        name: "mini_swe_agent",
        package: "mini-swe-agent",
        needs: Needs::Python("client-mini-swe-agent"),
        steps: mini_swe_agent,
        ..OF_PYTHON
    },
    Client {
        name: "openhands_agent",
        package: "openhands-sdk",
        needs: Needs::Python312("client-openhands"),
        steps: openhands,
        courses: &[Course::Cut],
        counts_repeats: false,
        ..OF_PYTHON
    },
    Client { name: "litellm_chat", package: "litellm", needs: Needs::Python("client-litellm"), ..OF_PYTHON },
    Client {
        name: "pydantic_ai_chat",
        package: "pydantic-ai-slim",
        needs: Needs::Python("client-pydantic-ai"),
        ..OF_PYTHON
    },
    Client {
        name: "dspy_react",
        package: "dspy",
        needs: Needs::Python("client-dspy"),
        steps: dspy,
        stateless: &["observation_0", "observation_1", "observation_2"],
        ..OF_PYTHON
    },
    Client {
        name: "llama_index_agent",
        package: "llama-index-core",
        needs: Needs::Python("client-llama-index"),
        ..OF_PYTHON
    },
    Client { name: "autogen_agent", package: "autogen-agentchat", needs: Needs::Python("client-autogen"), ..OF_PYTHON },
    Client { name: "ai_responses", package: "ai", ..OF_NODE },
    Client { name: "ai_chat", package: "ai", ..OF_NODE },
    Client { name: "ai_messages", package: "ai", ..OF_NODE },
    Client {
        name: "claude_code",
        package: "@anthropic-ai/claude-code",
        is_anthropic: true,
        steps: claude_code,
        ..PROGRAM
    },
    Client {
        name: "claude_code_default",
        package: "@anthropic-ai/claude-code",
        is_anthropic: true,
        steps: claude_code,
        ..PROGRAM
    },
    Client { name: "codex", package: "@openai/codex", steps: codex, ..OF_NODE },
    Client { name: "codex_default", package: "@openai/codex", steps: codex_default, ..OF_NODE },
    Client { name: "opencode", package: "opencode-ai", steps: opencode, ..PROGRAM },
    Client { name: "qwen_code", package: "@qwen-code/qwen-code", steps: qwen_code, ..PROGRAM },
];

const OF_PYTHON: Client = Client {
    name: "",
    needs: Needs::Python("client-apis"),
    package: "",
    is_anthropic: false,
    steps: two_tools,
    stateless: &[],
    courses: &[Course::Twice, Course::Cut],
    counts_repeats: true,
};
const OF_NODE: Client = Client { needs: Needs::Node, ..OF_PYTHON };
/// A program whose answers name its folder, so that two of it cannot have the same.
const PROGRAM: Client = Client { courses: &[Course::Cut], ..OF_NODE };

/// JSON as models write it: with a space behind each colon and comma.
fn arguments(fields: &[(&str, &str)]) -> String {
    let fields: Vec<String> = fields.iter().map(|(name, text)| format!("\"{name}\": {}", json!(text))).collect();
    format!("{{{}}}", fields.join(", "))
}

/// The tools of `tests/clients/tools.py`.
fn two_tools(_folder: &Path) -> Vec<Step> {
    vec![
        Step::call("write_file", &arguments(&[("path", "calc.py"), ("text", FIXED)])),
        Step::call("run", &arguments(&[("command", TEST)])),
        Step::say("The test passes."),
    ]
}

fn smolagents(folder: &Path) -> Vec<Step> {
    let mut steps = two_tools(folder);
    steps[2] = Step::call("final_answer", &arguments(&[("answer", "The test passes.")]));
    steps
}

/// Its adapter asks for named fields as text.
fn dspy(_folder: &Path) -> Vec<Step> {
    let say = |fields: &[(&str, &str)]| {
        let fields: Vec<String> = fields.iter().map(|(name, text)| format!("[[ ## {name} ## ]]\n{text}\n\n")).collect();
        Step::say(&format!("{}[[ ## completed ## ]]", fields.concat()))
    };
    let call = |thought: &str, name: &str, arguments: &str| {
        say(&[("next_thought", thought), ("next_tool_name", name), ("next_tool_args", arguments)])
    };
    vec![
        call("I repair the sign.", "write_file", &arguments(&[("path", "calc.py"), ("text", FIXED)])),
        call("I run the test.", "run", &arguments(&[("command", TEST)])),
        call("Done.", "finish", "{}"),
        say(&[("reasoning", "The test ran."), ("answer", "The test passes.")]),
    ]
}

fn mini_swe_agent(_folder: &Path) -> Vec<Step> {
    let say = |text: &str, command: &str| Step {
        content: text.to_owned(),
        ..Step::call("bash", &arguments(&[("command", command)]))
    };
    vec![
        say("I repair the sign.", "sed -i 's/a - b/a + b/' calc.py"),
        say("I run the test.", TEST),
        say("Done.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
}

fn openhands(folder: &Path) -> Vec<Step> {
    openhands_repair(folder, "a + b")
}

/// What OpenHands is answered if the model repairs the file in this way.
pub(crate) fn openhands_repair(folder: &Path, repair: &str) -> Vec<Step> {
    let path = folder.join("calc.py").display().to_string();
    let edit = [("command", "str_replace"), ("path", &path), ("old_str", "a - b"), ("new_str", repair)];
    vec![
        Step::call("file_editor", &arguments(&edit)),
        Step::call("terminal", &arguments(&[("command", TEST)])),
        Step::call("finish", &arguments(&[("message", "The test passes.")])),
    ]
}

fn claude_code(folder: &Path) -> Vec<Step> {
    let path = folder.join("calc.py").display().to_string();
    vec![
        Step::call("Read", &arguments(&[("file_path", &path)])),
        Step::call("Edit", &arguments(&[("file_path", &path), ("old_string", "a - b"), ("new_string", "a + b")])),
        Step::call("Bash", &arguments(&[("command", TEST), ("description", "Run the test")])),
        Step::say("The test passes."),
    ]
}

fn codex(_folder: &Path) -> Vec<Step> {
    vec![
        Step::call("exec_command", &arguments(&[("cmd", "sed -i 's/a - b/a + b/' calc.py")])),
        Step::call("exec_command", &arguments(&[("cmd", TEST)])),
        Step::say("The test passes."),
    ]
}

/// Its one tool for commands takes JavaScript.
fn codex_default(_folder: &Path) -> Vec<Step> {
    let run = |command: &str| {
        let script = format!("const done = await tools.exec_command({{cmd: {}}});\ntext(done.output);", json!(command));
        Step::call("exec", &arguments(&[("input", &script)]))
    };
    vec![run("sed -i 's/a - b/a + b/' calc.py"), run(TEST), Step::say("The test passes.")]
}

fn opencode(folder: &Path) -> Vec<Step> {
    let path = folder.join("calc.py").display().to_string();
    vec![
        Step::call("read", &arguments(&[("filePath", &path)])),
        Step::call("edit", &arguments(&[("filePath", &path), ("oldString", "a - b"), ("newString", "a + b")])),
        Step::call("bash", &arguments(&[("command", TEST), ("description", "Runs the test")])),
        Step::say("The test passes."),
    ]
}

fn qwen_code(folder: &Path) -> Vec<Step> {
    let path = folder.join("calc.py").display().to_string();
    vec![
        Step::call("read_file", &arguments(&[("file_path", &path)])),
        Step::call("edit", &arguments(&[("file_path", &path), ("old_string", "a - b"), ("new_string", "a + b")])),
        Step::call("run_shell_command", &format!("{{\"command\": {}, \"is_background\": false}}", json!(TEST))),
        Step::say("The test passes."),
    ]
}
