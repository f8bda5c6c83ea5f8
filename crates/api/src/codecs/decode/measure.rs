//! Counts what a body would hold after parsing, without building any of it.
//!
//! It is separate from the parser because the parser checks the bounds of a trajectory only after building it: two
//! million empty segments are 64 MiB as text and seven times that in memory. Only bodies long enough for that are read
//! twice.

use std::fmt;

use forebay_domain::{
    columns::COLUMNS_MAX,
    media::NAMED_MAX,
    trajectory::{REWARD_COMPONENTS_MAX, TrajectoryLimits},
};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::{codecs::decode::BODY_SEGMENTS_MAX, http::problem::Failure};

/// The size up to which a body is parsed without counting, because it takes a few MiB of memory at most. One of 1 MiB took
/// up to 40 MiB.
const FREE_BYTES: usize = 64 << 10;

/// Refuses a trajectory or a bundle that holds more than allowed. The parser reports all other errors.
pub(super) fn check(bytes: &[u8], limits: &TrajectoryLimits) -> Result<(), Failure> {
    if bytes.len() <= FREE_BYTES {
        return Ok(());
    }
    let list = List::SEGMENTS;
    let mut count = Count { limits, index: None, list, body_segments: 0, segments: 0, tokens: 0, excess: None };
    let read = Body(&mut count).deserialize(&mut serde_json::Deserializer::from_slice(bytes));
    match (read, count.excess) {
        (Err(_), Some((field, detail))) => {
            let index = count.index.map(|index| format!("/{index}")).unwrap_or_default();
            Err(Failure::invalid(index + field, detail))
        }
        _ => Ok(()),
    }
}

/// The counts so far, in the whole body and in the current trajectory.
struct Count<'l> {
    limits: &'l TrajectoryLimits,
    /// The index of the trajectory in its bundle.
    index: Option<usize>,
    /// The list that is being read.
    list: List,
    /// Segments and turns.
    body_segments: usize,
    segments: usize,
    /// The sum of the lengths of the longest array of each segment, except the current one. No valid column is longer
    /// than the segment's tokens. The prompt of a turn is an array of its own and is counted beside its longest one.
    tokens: usize,
    /// The field that exceeds its limit, and the error.
    excess: Option<(&'static str, String)>,
}

/// A list of segments or turns.
#[derive(Clone, Copy)]
struct List {
    field: &'static str,
    units: &'static str,
}

impl List {
    const SEGMENTS: Self = Self { field: "/segments", units: "segments" };
    const TURNS: Self = Self { field: "/turns", units: "turns" };
}

impl Count<'_> {
    /// Stops reading if a count exceeds its limit.
    fn bound<E: serde::de::Error>(
        &mut self,
        found: usize,
        max: usize,
        field: &'static str,
        unit: &str,
    ) -> Result<(), E> {
        if found <= max {
            return Ok(());
        }
        self.excess = Some((field, format!("must have at most {max} {unit}")));
        Err(E::custom("too much"))
    }

    fn segment<E: serde::de::Error>(&mut self, tokens: usize) -> Result<(), E> {
        let List { field, units } = self.list;
        self.segments += 1;
        self.body_segments += 1;
        self.tokens += tokens;
        self.bound(self.tokens, self.limits.tokens_max, field, "tokens")?;
        self.bound(self.segments, self.limits.segments_max, field, units)?;
        self.bound(self.body_segments, BODY_SEGMENTS_MAX, field, &format!("{units} in one body"))
    }
}

/// Declares a seed that visits objects, arrays or both, and accepts any other value.
macro_rules! seed {
    ($(#[$doc:meta])* $name:ident -> $value:ty { $($visit:item)* }) => {
        $(#[$doc])*
        struct $name<'c, 'l>(&'c mut Count<'l>);

        impl<'de> DeserializeSeed<'de> for $name<'_, '_> {
            type Value = $value;

            fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<$value, D::Error> {
                deserializer.deserialize_any(self)
            }
        }

        impl<'de> Visitor<'de> for $name<'_, '_> {
            type Value = $value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("what the parser expects")
            }

            $($visit)*
        }
    };
}

seed! {
    /// A trajectory, or a bundle of them.
    Body -> () {
        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<(), A::Error> {
            Trajectory(self.0).visit_map(map)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
            self.0.index = Some(0);
            while seq.next_element_seed(Trajectory(&mut *self.0))?.is_some() {
                self.0.index = self.0.index.map(|index| index + 1);
            }
            Ok(())
        }
    }
}

seed! {
    Trajectory -> () {
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
            (self.0.segments, self.0.tokens) = (0, 0);
            while let Some(key) = map.next_key::<String>()? {
                match key.as_str() {
                    "segments" => {
                        self.0.list = List::SEGMENTS;
                        map.next_value_seed(Segments(&mut *self.0))?;
                    }
                    "turns" => {
                        self.0.list = List::TURNS;
                        map.next_value_seed(Segments(&mut *self.0))?;
                    }
                    "reward_components" => map.next_value_seed(Components(&mut *self.0))?,
                    _ => drop(map.next_value::<IgnoredAny>()?),
                }
            }
            Ok(())
        }
    }
}

seed! {
    Components -> () {
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
            let mut entries = 0;
            while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                entries += 1;
                self.0.bound(entries, REWARD_COMPONENTS_MAX, "/reward_components", "entries")?;
            }
            Ok(())
        }

        fn visit_unit<E>(self) -> Result<(), E> {
            Ok(())
        }
    }
}

seed! {
    /// A list of segments or of turns.
    Segments -> () {
        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
            while let Some(tokens) = seq.next_element_seed(Segment(&mut *self.0))? {
                self.0.segment(tokens)?;
            }
            Ok(())
        }

        fn visit_unit<E>(self) -> Result<(), E> {
            Ok(())
        }
    }
}

seed! {
    /// The length of the longest array of a segment or turn, and of the prompt of a turn.
    Segment -> usize {
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<usize, A::Error> {
            let (mut longest, mut prompt) = (0, 0);
            while let Some(key) = map.next_key::<String>()? {
                if key == "columns" {
                    map.next_value_seed(Uploads(&mut *self.0))?;
                    continue;
                }
                let length = map.next_value_seed(Column(&mut *self.0))?;
                if key == "media" {
                    self.0.bound(length, NAMED_MAX, self.0.list.field, "media in one segment")?;
                }
                let part = if key.starts_with("prompt_token") { &mut prompt } else { &mut longest };
                *part = length.max(*part);
            }
            Ok(longest + prompt)
        }
    }
}

seed! {
    /// The uploads that a segment names as its columns.
    Uploads -> () {
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
            let mut entries = 0;
            while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                entries += 1;
                self.0.bound(entries, COLUMNS_MAX, self.0.list.field, "columns in one segment")?;
            }
            Ok(())
        }

        fn visit_unit<E>(self) -> Result<(), E> {
            Ok(())
        }
    }
}

seed! {
    /// The length of an array.
    Column -> usize {
        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<usize, A::Error> {
            let mut entries = 0;
            while seq.next_element::<IgnoredAny>()?.is_some() {
                entries += 1;
                self.0.bound(self.0.tokens + entries, self.0.limits.tokens_max, self.0.list.field, "tokens")?;
            }
            Ok(entries)
        }

        fn visit_unit<E>(self) -> Result<usize, E> {
            Ok(0)
        }

        fn visit_bool<E>(self, _value: bool) -> Result<usize, E> {
            Ok(0)
        }

        fn visit_i64<E>(self, _value: i64) -> Result<usize, E> {
            Ok(0)
        }

        fn visit_u64<E>(self, _value: u64) -> Result<usize, E> {
            Ok(0)
        }

        fn visit_f64<E>(self, _value: f64) -> Result<usize, E> {
            Ok(0)
        }

        fn visit_str<E>(self, _value: &str) -> Result<usize, E> {
            Ok(0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_domain::surrogates::LoneSurrogates;

    const LIMITS: TrajectoryLimits = TrajectoryLimits {
        tokens_max: 10,
        segments_max: 3,
        metadata_bytes_max: 0,
        lone_surrogates: LoneSurrogates::Replace,
    };

    /// The pointer to the excess in a body, which is padded so that it is long enough to be counted.
    fn excess(body: &str) -> Option<String> {
        let body = format!("{}{body}", " ".repeat(FREE_BYTES));
        check(body.as_bytes(), &LIMITS).err().map(|failure| failure.into_problem().errors[0].pointer.clone())
    }

    #[test]
    fn what_is_within_the_limits_passes() {
        let segment = r#"{"kind":"a","tokens":[1,2,3],"loss_mask":[1,1],"versions":[[0,0,2]],"logprobs":null}"#;
        let whole =
            format!(r#"{{"segments":[{segment},{segment},{segment}],"messages":[[[1,2,3,4,5,6,7,8,9,10,11]]]}}"#);
        assert_eq!(excess(&whole), None);
        assert_eq!(excess(&format!("[{whole},{whole}]")), None);
    }

    #[test]
    fn the_first_excess_ends_the_reading() {
        assert_eq!(excess(r#"{"segments":[{"tokens":[1,2,3,4,5,6,7,8,9,10,11,#"#).as_deref(), Some("/segments"));
        assert_eq!(
            excess(r#"{"segments":[{"tokens":[1,2,3,4,5,6]},{"values":[1,2,3,4,5,#"#).as_deref(),
            Some("/segments")
        );
        assert_eq!(excess(r#"{"segments":[{},{},{},{},#"#).as_deref(), Some("/segments"));
        assert_eq!(excess(r#"[{"segments":[{},{},{}]},{"segments":[{},{},{},{},#"#).as_deref(), Some("/1/segments"));
        // Values after a null field are counted, too.
        let absent = r#"[{"segments":null,"reward_components":null},{"segments":[{},{},{},{},#"#;
        assert_eq!(excess(absent).as_deref(), Some("/1/segments"));
        assert_eq!(excess(r#"[{"turns":[{"tokens":[1,2]},{},{},{},#"#).as_deref(), Some("/0/turns"));
        assert_eq!(
            excess(r#"{"turns":[{"tokens":[1,2,3,4,5,6],"prompt_tokens":[1,2,3,4,5]},#"#).as_deref(),
            Some("/turns")
        );
        let names = (0..33).map(|index| format!("\"{index}\":{{}},")).collect::<Vec<_>>().concat();
        assert_eq!(excess(&format!(r#"{{"segments":[{{"columns":{{{names}#"#)).as_deref(), Some("/segments"));
        // Values after the columns are counted, too.
        let after = r#"{"segments":[{"columns":{"a":{}},"tokens":[1,2,3,4,5,6,7,8,9,10,11,#"#;
        assert_eq!(excess(after).as_deref(), Some("/segments"));
        let components = (0..65).map(|index| format!("\"{index}\":0,")).collect::<Vec<_>>().concat();
        assert_eq!(excess(&format!(r#"{{"reward_components":{{{components}#"#)).as_deref(), Some("/reward_components"));
    }

    #[test]
    fn what_is_no_trajectory_is_left_to_the_parser() {
        for body in
            ["", "1", "null", "[1]", "{\"segments\":1}", "{\"segments\":[1]}", "{\"segments\":[{\"tokens\":{}}]}"]
        {
            assert_eq!(excess(body), None, "{body}");
        }
    }
}
