//! Decodes bodies with trajectories. Bounds are checked before parsing, because parsing builds values in memory.
//!
//! [`fast_path`] reads nearly all bodies. The general parser reads the others, after [`measure`] has counted what they
//! would hold.

mod fast_path;
mod measure;

use std::fmt;

use forebay_domain::trajectory::TrajectoryLimits;
use forebay_wire::{Object, Trajectory};
use serde::{
    Deserialize, Deserializer,
    de::{self, SeqAccess, Visitor},
};

use crate::http::problem::Failure;

/// The most trajectories of one bundle.
pub(crate) const BUNDLE_MAX: usize = 4_096;

/// The most segments of all trajectories of one body. A segment takes about 200 bytes in addition to its tokens.
pub(crate) const BODY_SEGMENTS_MAX: usize = 262_144;

/// The shape of a JSON body, which is also the shape of its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Object,
    Array,
}

/// Decodes the trajectories of a JSON body.
pub(crate) fn body(bytes: &[u8], limits: &TrajectoryLimits) -> Result<(Vec<Trajectory>, Shape), Failure> {
    fast_path::body(bytes, limits).map_or_else(|| general(bytes, limits), Ok)
}

/// Decodes any body: counts it, parses it, and reports errors with pointers.
fn general(bytes: &[u8], limits: &TrajectoryLimits) -> Result<(Vec<Trajectory>, Shape), Failure> {
    measure::check(bytes, limits)?;
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    if first != Some(&b'[') {
        return Ok((vec![crate::http::body::parse::<Object<_>>(bytes)?.0], Shape::Object));
    }
    let Bundle(bundle) = crate::http::body::parse(bytes)?;
    if bundle.is_empty() {
        return Err(Failure::invalid("", format!("a bundle has 1 to {BUNDLE_MAX} trajectories")));
    }
    Ok((bundle, Shape::Array))
}

/// The results of both parsers for a body that the fast path accepts. Tests check that they are equal.
pub(crate) fn readings(bytes: &[u8], limits: &TrajectoryLimits) -> Option<(Vec<Trajectory>, Option<Vec<Trajectory>>)> {
    let (fast, _) = fast_path::body(bytes, limits)?;
    Some((fast, general(bytes, limits).ok().map(|(general, _)| general)))
}

/// Decodes the trajectory of a line of a bulk body.
pub(crate) fn line(bytes: &[u8], limits: &TrajectoryLimits) -> Result<Trajectory, Failure> {
    if let Some((mut read, Shape::Object)) = fast_path::body(bytes, limits)
        && let Some(trajectory) = read.pop()
    {
        return Ok(trajectory);
    }
    measure::check(bytes, limits)?;
    crate::http::body::parse(bytes).map(|Object(trajectory)| trajectory)
}

/// An array of trajectories. An array that is too long is refused as soon as the limit is exceeded, before the rest is
/// parsed.
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
