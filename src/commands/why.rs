//! `forebay why`: the reasons that the live page shows, in a terminal.

use std::{
    fmt::Write as _,
    io::{Write as _, stdout},
};

use anyhow::bail;
use clap::Args;
use forebay_client::{
    Client, ClientError,
    wire::{IdWhy, PolicyWhy},
};

use super::{service::ServiceArgs, text::shown};

/// The arguments of `forebay why`.
#[derive(Args)]
pub(crate) struct WhyArgs {
    /// Name of a policy, or id of a rollout, group, batch or session; a policy is looked for first
    #[arg(value_name = "ID|POLICY")]
    what: String,
    /// Look for the id in this policy only, and do not take it for the name of a policy
    #[arg(long, value_name = "POLICY")]
    policy: Option<String>,
    /// Print the answer of the service as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    service: ServiceArgs,
}

/// What the service answers.
enum Found {
    Policy(Box<PolicyWhy>),
    Id(Box<IdWhy>),
}

/// Prints why a policy is as it is, or what became of an id.
#[tokio::main(flavor = "current_thread")]
pub(crate) async fn why(args: &WhyArgs) -> anyhow::Result<()> {
    let client = args.service.client()?;
    let found = find(&client, &args.what, args.policy.as_deref()).await;
    let Some(found) = found.map_err(|error| args.service.failed(error))? else {
        bail!(
            "`{}` is no policy, and no id of a rollout, group, batch or session that this key may see: it was never posted \
             here, or it was forgotten",
            args.what
        );
    };
    let text = match (args.json, &found) {
        (true, Found::Policy(why)) => serde_json::to_string_pretty(why)? + "\n",
        (true, Found::Id(why)) => serde_json::to_string_pretty(why)? + "\n",
        (false, Found::Policy(why)) => of_policy(why, &args.service.url),
        (false, Found::Id(why)) => of_id(why, &args.service.url),
    };
    stdout().write_all(text.as_bytes())?;
    Ok(())
}

async fn find(client: &Client, what: &str, policy: Option<&str>) -> Result<Option<Found>, ClientError> {
    if policy.is_none()
        && is_policy_name(what)
        && let Some(why) = client.policy_why(what).await?
    {
        return Ok(Some(Found::Policy(Box::new(why))));
    }
    Ok(client.why(what, policy).await?.map(|why| Found::Id(Box::new(why))))
}

/// Whether the service would accept a text as the name of a policy.
fn is_policy_name(text: &str) -> bool {
    let is_allowed = |character: char| character.is_ascii_alphanumeric() || "._-".contains(character);
    !["", ".", ".."].contains(&text) && text.len() <= 128 && text.chars().all(is_allowed)
}

/// A policy, its state and its causes, in lines.
pub(super) fn of_policy(why: &PolicyWhy, url: &str) -> String {
    let mut text =
        format!("{} {}  {}\n  {}\n", why.state.glyph(), why.policy, why.state.as_str(), shown(&why.headline));
    for (index, cause) in why.causes.iter().enumerate() {
        let _ = writeln!(text, "\n  {}. {}", index + 1, shown(&cause.text));
        if let Some(see) = &cause.see {
            let _ = writeln!(text, "     see {}", address(see, url));
        }
    }
    for (title, findings) in [("Not the reason", &why.ruled_out), ("Not known", &why.unknown)] {
        if !findings.is_empty() {
            let _ = writeln!(text, "\n  {title}:");
        }
        for finding in findings {
            let _ = writeln!(text, "   - {}", shown(&finding.text));
        }
    }
    text
}

/// The whole address of a call, so that it can be pasted.
fn address(see: &str, url: &str) -> String {
    match see.strip_prefix('.') {
        Some(path) => shown(&format!("{}{path}", url.trim_end_matches('/'))),
        None => shown(see),
    }
}

fn of_id(why: &IdWhy, url: &str) -> String {
    let kind = why.kind.as_str();
    let (id, headline) = (shown(&why.id), shown(&why.headline));
    let mut text = format!("{kind} {id} of {}: {}\n  {headline}\n\n", why.policy, why.state);
    for step in &why.causes {
        let at = step.at.as_deref().unwrap_or("-");
        let _ = writeln!(text, "  {at:<27} {}", shown(&step.text));
        if let Some(rule) = &step.rule {
            let _ = writeln!(text, "  {:<27}   {}", "", shown(rule));
        }
    }
    let _ = writeln!(text, "\n  see {}", address(&why.see, url));
    for other in &why.also {
        let _ = writeln!(text, "  also a {} of {}", other.kind.as_str(), other.policy);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_policies_are_told_from_other_ids() {
        for name in ["default", "math.solver", "a-1_b"] {
            assert!(is_policy_name(name), "{name}");
        }
        for id in ["", ".", "..", "a/b", "a b", "ä"] {
            assert!(!is_policy_name(id), "{id}");
        }
    }
}
