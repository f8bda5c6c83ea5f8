//! Our own trajectories: a line per rollout, as `forebay export --format forebay` and `GET /exports` write them and
//! `POST /trajectories` takes them.
//!
//! Everything comes back as it was posted. What had become of a rollout is not imported, because the service decides that
//! anew.

use forebay_wire::{Trajectory, Violation};
use serde_json::value::RawValue;

use crate::{
    format::{Document, Format, Imported, Layout, each},
    ids::digest_id,
    json::{self, Problems},
    labels::Labels,
    options::Options,
};

pub(crate) const FORMAT: Format = Format {
    name: "forebay",
    about: "trajectories of the API, one JSON object per line, as `forebay export` writes them",
    layout: Layout::Lines,
    reader: |options| each(options, convert),
};

fn convert(document: &Document<'_>, options: &Options) -> Result<Imported, Vec<Violation>> {
    let mut fields = json::fields(document.text)?;
    // An export may end with the numbers of its rollouts.
    if fields.len() == 1 && fields.contains_key("summary") {
        return Ok(Imported::default());
    }
    let whole = json::whole(document.text)?;
    // With its results, an export has each trajectory in a field.
    let (at, record) = match fields.remove("trajectory") {
        Some(record) => ("/trajectory", record),
        None => ("", whole),
    };
    let trajectory: Trajectory = json::object(at, record).map_err(|violation| vec![violation])?;
    let mut problems = Problems::default();
    let labels = Labels::of_options(options, whole, &mut problems);
    let trajectory = labelled(trajectory, labels, options, record);
    problems.or(Imported { trajectories: vec![trajectory], ..Imported::default() })
}

/// The trajectory with the labels of the options in the place of its own.
fn labelled(own: Trajectory, labels: Labels, options: &Options, record: &RawValue) -> Trajectory {
    let prefix = options.prefix.as_deref().unwrap_or_default();
    let id = || digest_id("forebay", record.get().as_bytes());
    let rollout_id = labels.rollout_id.or(own.rollout_id).unwrap_or_else(id);
    let group_id = labels.group_id.or(own.group_id);
    Trajectory {
        policy: labels.policy.or(own.policy),
        rollout_id: Some(format!("{prefix}{rollout_id}")),
        group_id: group_id.map(|group_id| format!("{prefix}{group_id}")),
        group_size: labels.group_size.or(own.group_size),
        environment: labels.environment.or(own.environment),
        policy_version: labels.policy_version.or(own.policy_version),
        reward: labels.reward.or(own.reward),
        ..own
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, options: &Options) -> Result<Imported, Vec<Violation>> {
        convert(&Document { line: 1, text: text.as_bytes() }, options)
    }

    const LINE: &str = r#"{"policy":"p","rollout_id":"r","group_id":"g","group_size":2,"status":"truncated","reward":0.1,"sampling":{"temperature":0.7,"top_p":1.0,"top_k":-1},"segments":[{"tokens":[1,2],"loss_mask":[1],"logprobs":[-1e-7],"versions":[[3,0,1]]}],"messages":[{"b":1.50}],"metadata":{"a":1e2}}"#;

    #[test]
    fn a_trajectory_comes_back_as_it_was_written() {
        for text in [LINE.to_owned(), format!(r#"{{"trajectory":{LINE},"result":{{"run":1}}}}"#)] {
            let imported = read(&text, &Options::default()).expect("it is a trajectory");
            assert_eq!(serde_json::to_string(&imported.trajectories).expect("plain data"), format!("[{LINE}]"));
        }
    }

    #[test]
    fn options_take_precedence_and_a_summary_is_no_rollout() {
        let options = Options { policy: Some("q".to_owned()), prefix: Some("x-".to_owned()), ..Options::default() };
        let imported = read(LINE, &options).expect("it is a trajectory");
        let found = &imported.trajectories[0];
        assert_eq!((found.policy.as_deref(), found.rollout_id.as_deref()), (Some("q"), Some("x-r")));
        assert_eq!((found.group_id.as_deref(), found.environment.as_deref()), (Some("x-g"), None));
        let summary = r#"{"summary":{"rollouts":1,"filtered":0,"unevaluated":0,"purged":0,"damaged":0}}"#;
        assert!(read(summary, &options).expect("it is ignored").trajectories.is_empty());
        let without_id = r#"{"reward":1.0,"segments":[{"tokens":[1,2],"loss_mask":[1]}]}"#;
        let ids = [(); 2]
            .map(|()| read(without_id, &Options::default()).expect("it is one").trajectories[0].rollout_id.clone());
        assert!(ids[0].is_some() && ids[0] == ids[1]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let pointer = |text: &str| read(text, &Options::default()).expect_err("it is wrong")[0].pointer.clone();
        assert_eq!(
            pointer(r#"{"rollout_id":"r","segments":[{"tokens":["x"],"loss_mask":[1]}]}"#),
            "/segments/0/tokens/0"
        );
        assert_eq!(pointer(r#"{"trajectory":{"reward":"good"},"result":{}}"#), "/trajectory/reward");
        assert_eq!(pointer("{"), "");
    }
}
