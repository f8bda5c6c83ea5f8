//! ATIF, the agent trajectory interchange format, versions 1.0 to 1.8: one trajectory per file or per line.
//!
//! Steps of the agent with ids become turns, which the service assembles. Embedded trajectories of sub-agents are a part
//! of the same rollout, so their segments are siblings. ATIF has no reward, group or policy: they come from the options,
//! from an envelope around the trajectory, or from its `extra`.

mod check;
mod messages;
mod schema;
mod turns;

use forebay_wire::Violation;
use serde_json::{Value, json, value::RawValue};

use self::schema::Trajectory;
use crate::{
    format::{Document, Format, Imported, Layout, Note, each},
    ids::digest_id,
    json::{self, Problems},
    labels::Labels,
    options::Options,
    tools,
};

pub(crate) const FORMAT: Format = Format {
    name: "atif",
    about: "ATIF 1.0 to 1.8, one trajectory per file or per line",
    layout: Layout::LinesOrDocument,
    reader: |options| each(options, convert),
};

/// The field of an envelope that has the trajectory.
const ENVELOPE: &str = "trajectory";

/// The most bytes of `extra` that become a part of the metadata.
const EXTRA_BYTES_MAX: usize = 16 << 10;

fn convert(document: &Document<'_>, options: &Options) -> Result<Imported, Vec<Violation>> {
    let mut imported = Imported::default();
    let text = json::characters(document.text, &mut imported)?;
    let mut fields = json::fields(text.as_bytes())?;
    let record: &RawValue = json::whole(text.as_bytes())?;
    let mut problems = Problems::default();
    let given = Labels::of_options(options, record, &mut problems);
    let (base, text, of_envelope) = match fields.remove(ENVELOPE) {
        Some(text) => {
            let labels = Labels::take(&mut fields, "", &mut problems);
            for name in fields.keys() {
                let detail = "is no field of an envelope: it has `trajectory` and the labels of a rollout";
                problems.push(format!("/{}", json::escape(name)), detail);
            }
            ("/trajectory", text, labels)
        }
        None => ("", record, Labels::default()),
    };
    let trajectory: Trajectory = json::object(base, text).map_err(|violation| vec![violation])?;
    check::check(base, &trajectory, &mut problems);
    let of_extra = labels_of_extra(base, &trajectory, &mut problems);
    let turns = turns::read(base, &trajectory, &mut imported, &mut problems);
    problems.or(())?;
    let has_metadata = of_envelope.metadata.is_some();
    let own = Labels { rollout_id: trajectory.trajectory_id.clone(), ..Labels::default() };
    let labels = given.or(of_envelope).or(of_extra).or(own);
    let mut rollout = labels.trajectory(options, || digest_id(FORMAT.name, text.get().as_bytes()));
    rollout.turns = turns;
    let messages = messages::of(&trajectory);
    rollout.messages = (!messages.is_empty()).then(|| json::raw(&messages));
    if !has_metadata {
        rollout.metadata = Some(json::raw(&metadata(&trajectory, &mut imported)));
    }
    let defined = trajectory.agent.0.tool_definitions.as_ref().map(|tools| json::raw(&tools));
    tools::add(&mut rollout.metadata, defined.as_deref(), &mut imported);
    imported.trajectories.push(rollout);
    Ok(imported)
}

/// The labels in `extra`, which is free-form apart from them.
fn labels_of_extra(base: &str, trajectory: &Trajectory, problems: &mut Problems) -> Labels {
    let Some(extra) = &trajectory.extra else { return Labels::default() };
    let mut fields = json::fields(extra.get().as_bytes()).unwrap_or_default();
    Labels::take_identity(&mut fields, &format!("{base}/extra"), problems)
}

fn metadata(trajectory: &Trajectory, imported: &mut Imported) -> Value {
    let extra = trajectory.extra.as_ref().filter(|extra| {
        let fits = extra.get().len() <= EXTRA_BYTES_MAX;
        imported.note(Note::ExtraLeftOut, u64::from(!fits));
        fits
    });
    json!({
        "source": {
            "format": FORMAT.name,
            "schema_version": trajectory.schema_version,
            "session_id": trajectory.session_id,
            "trajectory_id": trajectory.trajectory_id,
            "agent": trajectory.agent.0.name,
            "agent_version": trajectory.agent.0.version,
            "model": trajectory.agent.0.model_name,
        },
        "extra": extra.map(|extra| serde_json::from_str::<Value>(extra.get()).unwrap_or_default()),
    })
}

#[cfg(test)]
mod tests;
