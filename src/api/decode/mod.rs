//! Bodies with trajectories, decoded: bounds first, since parsing builds what it reads.
//!
//! Nearly all are read by [`quick`]; what it leaves is read by the general parser, after [`measure`] has counted it.

mod measure;
mod numbers;
mod quick;
mod usual;

use std::fmt;

use forebay_client::wire::{Object, Trajectory};
use serde::{
    Deserialize, Deserializer,
    de::{self, SeqAccess, Visitor},
};

use super::problem::Failure;
use crate::buffer::trajectory::TrajectoryLimits;

/// Trajectories of one bundle.
pub(super) const BUNDLE_MAX: usize = 4_096;

/// Segments of all trajectories of one body: a segment takes some 200 bytes besides its tokens.
pub(super) const BODY_SEGMENTS_MAX: usize = 262_144;

/// What a JSON body was, and so what its answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Object,
    Array,
}

/// The trajectories of a JSON body, one or many.
pub(super) fn body(bytes: &[u8], limits: &TrajectoryLimits) -> Result<(Vec<Trajectory>, Shape), Failure> {
    quick::body(bytes, limits).map_or_else(|| general(bytes, limits), Ok)
}

/// Any body: counted, then parsed, and told where it is wrong.
fn general(bytes: &[u8], limits: &TrajectoryLimits) -> Result<(Vec<Trajectory>, Shape), Failure> {
    measure::check(bytes, limits)?;
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    if first != Some(&b'[') {
        return Ok((vec![super::body::parse::<Object<_>>(bytes)?.0], Shape::Object));
    }
    let Bundle(bundle) = super::body::parse(bytes)?;
    if bundle.is_empty() {
        return Err(Failure::invalid("", format!("a bundle has 1 to {BUNDLE_MAX} trajectories")));
    }
    Ok((bundle, Shape::Array))
}

/// What both readers make of a body that the quick one takes: the same.
pub(super) fn readings(bytes: &[u8], limits: &TrajectoryLimits) -> Option<(Vec<Trajectory>, Option<Vec<Trajectory>>)> {
    let (quick, _) = quick::body(bytes, limits)?;
    Some((quick, general(bytes, limits).ok().map(|(general, _)| general)))
}

/// The trajectory of a line of a bulk body.
pub(super) fn line(bytes: &[u8], limits: &TrajectoryLimits) -> Result<Trajectory, Failure> {
    if let Some((mut read, Shape::Object)) = quick::body(bytes, limits)
        && let Some(trajectory) = read.pop()
    {
        return Ok(trajectory);
    }
    measure::check(bytes, limits)?;
    super::body::parse(bytes).map(|Object(trajectory)| trajectory)
}

/// An array of trajectories that is refused at the first one too many, not when all are parsed.
struct Bundle(Vec<Trajectory>);

impl<'de> Deserialize<'de> for Bundle {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(BundleVisitor)
    }
}

struct BundleVisitor;

impl<'de> Visitor<'de> for BundleVisitor {
    type Value = Bundle;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of trajectories")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Bundle, A::Error> {
        let mut bundle = Vec::new();
        while let Some(Object(trajectory)) = seq.next_element()? {
            if bundle.len() >= BUNDLE_MAX {
                return Err(de::Error::custom(format_args!("a bundle has 1 to {BUNDLE_MAX} trajectories")));
            }
            bundle.push(trajectory);
        }
        Ok(Bundle(bundle))
    }
}
