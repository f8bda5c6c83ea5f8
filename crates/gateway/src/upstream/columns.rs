//! The lists of an engine's answer, read into columns.
//!
//! An answer has lists with an entry for each token, and may have any other list. As structures, they would take ten times
//! the bytes of the answer and more: an empty object has two bytes. So each entry is read alone, and only what is needed of
//! it is kept.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

/// The most tool calls of an answer.
pub(super) const TOOL_CALLS_MAX: usize = 1 << 12;

/// The most of the best tokens in one place that are read.
const BEST_MAX: usize = 32;

/// Ids as an engine writes them.
#[derive(Clone, Debug, Default)]
pub(super) struct Ids {
    /// An id that does not fit is -1 here.
    pub(super) ids: Vec<i32>,
    /// The first id that does not fit.
    outside: Option<i64>,
}

impl Ids {
    fn push(&mut self, id: i64) {
        let fits = i32::try_from(id);
        if fits.is_err() {
            self.outside.get_or_insert(id);
        }
        self.ids.push(fits.unwrap_or(-1));
    }

    /// Adds the ids of the next part of an answer.
    pub(super) fn append(&mut self, more: &Self) {
        self.ids.extend_from_slice(&more.ids);
        self.outside = self.outside.or(more.outside);
    }

    /// The first id that is negative, or not below `size`.
    pub(super) fn outside(&self, size: u32) -> Option<i64> {
        let is_outside = |&&id: &&i32| u32::try_from(id).map_or(true, |id| id >= size);
        self.outside.or_else(|| self.ids.iter().find(is_outside).map(|&id| id.into()))
    }
}

/// The log-probabilities of a chat completion, one for each token.
#[derive(Debug, Default)]
pub(super) struct TokenLogprobs {
    /// The number of entries.
    pub(super) count: usize,
    /// The values. NaN stands for one that is missing, and is the last one: an answer without it is refused.
    pub(super) values: Vec<f64>,
    /// The ids of the tokens, which only vLLM's endpoint of ids names.
    pub(super) ids: Vec<Option<i32>>,
    /// The best tokens in the first place: their texts and values, in no order.
    pub(super) best: Vec<(String, f64)>,
}

impl TokenLogprobs {
    /// Adds those of the next part of an answer.
    pub(super) fn append(&mut self, more: &Self) {
        self.count += more.count;
        if !self.values.last().is_some_and(|value| value.is_nan()) {
            self.values.extend_from_slice(&more.values);
            self.ids.extend_from_slice(&more.ids);
        }
    }
}

/// `meta_info.output_token_logprobs` of SGLang: log-probability, id and text of each sampled token.
#[derive(Debug, Default)]
pub(super) struct MetaLogprobs {
    /// NaN stands for a value that is missing.
    pub(super) values: Vec<f64>,
    pub(super) ids: Ids,
}

/// The answers of a chat completion, of which there must be one.
#[derive(Debug)]
pub(super) struct Choices<T> {
    pub(super) first: Option<T>,
    /// The others are only counted.
    pub(super) count: usize,
}

impl<T> Default for Choices<T> {
    fn default() -> Self {
        Self { first: None, count: 0 }
    }
}

/// What ended an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Matched {
    Text(String),
    Number(i64),
    /// Anything else.
    Other,
}

/// Reads a list and folds its entries into a column.
struct Fold<T, C>(fn(&mut C, T), PhantomData<C>);

impl<'de, T: Deserialize<'de>, C: Default> Visitor<'de> for Fold<T, C> {
    type Value = C;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<C, A::Error> {
        let mut column = C::default();
        while let Some(entry) = seq.next_element()? {
            (self.0)(&mut column, entry);
        }
        Ok(column)
    }
}

/// Implements `Deserialize` for a column.
macro_rules! column {
    ($column:ty, $entry:ty, $add:expr) => {
        impl<'de> Deserialize<'de> for $column {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let add: fn(&mut Self, $entry) = $add;
                deserializer.deserialize_seq(Fold(add, PhantomData))
            }
        }
    };
}

column!(Ids, i64, Self::push);

/// The entries behind the first missing value are only counted, because the answer is refused.
const ADD_LOGPROB: fn(&mut TokenLogprobs, TokenLogprob) = |column, entry| {
    if column.count == 0 {
        column.best = entry.top_logprobs.unwrap_or_default().0;
    }
    column.count += 1;
    if !column.values.last().is_some_and(|value| value.is_nan()) {
        column.values.push(entry.logprob.unwrap_or(f64::NAN));
        // An id that does not fit is no id of an answer that is recorded.
        column.ids.push(entry.token_id.map(|id| i32::try_from(id).unwrap_or(-1)));
    }
};

column!(TokenLogprobs, TokenLogprob, ADD_LOGPROB);

#[derive(Default, Deserialize)]
#[serde(default)]
struct TokenLogprob {
    logprob: Option<f64>,
    token_id: Option<i64>,
    top_logprobs: Option<TopLogprobs>,
}

/// The best tokens in one place.
#[derive(Default)]
struct TopLogprobs(Vec<(String, f64)>);

impl TopLogprobs {
    /// Entries without a value, and more than any engine is asked for, are left out.
    fn add(&mut self, TopLogprob { token, logprob }: TopLogprob) {
        if let Some(value) = logprob
            && self.0.len() < BEST_MAX
        {
            self.0.push((token, value));
        }
    }
}

column!(TopLogprobs, TopLogprob, Self::add);

#[derive(Deserialize)]
struct TopLogprob {
    #[serde(default)]
    token: String,
    logprob: Option<f64>,
}

#[derive(Deserialize)]
struct MetaLogprob(Option<f64>, i64, #[serde(default)] IgnoredAny);

column!(MetaLogprobs, MetaLogprob, |column, MetaLogprob(value, id, _)| {
    column.values.push(value.unwrap_or(f64::NAN));
    column.ids.push(id);
});

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Choices<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct First<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for First<T> {
            type Value = Choices<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Choices<T>, A::Error> {
                let first = seq.next_element()?;
                let mut count = usize::from(first.is_some());
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Choices { first, count })
            }
        }
        deserializer.deserialize_seq(First(PhantomData))
    }
}

/// Reads tool calls, if there are not too many.
pub(super) fn tool_calls<'de, D, T>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Calls<T>(Vec<T>);
    impl<'de, T: Deserialize<'de>> Deserialize<'de> for Calls<T> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            deserializer.deserialize_seq(Bounded(PhantomData)).map(Self)
        }
    }
    struct Bounded<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Bounded<T> {
        type Value = Vec<T>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a list")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
            let mut calls = Vec::new();
            while let Some(call) = seq.next_element()? {
                if calls.len() == TOOL_CALLS_MAX {
                    return Err(A::Error::custom(format_args!("more than {TOOL_CALLS_MAX} tool calls")));
                }
                calls.push(call);
            }
            Ok(calls)
        }
    }
    Ok(Option::<Calls<T>>::deserialize(deserializer)?.map(|Calls(calls)| calls))
}

impl<'de> Deserialize<'de> for Matched {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sign;
        impl<'de> Visitor<'de> for Sign {
            type Value = Matched;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("what ended the answer")
            }

            fn visit_str<E>(self, text: &str) -> Result<Matched, E> {
                Ok(Matched::Text(text.to_owned()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Matched, E> {
                Ok(Matched::Number(number))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Matched, E> {
                Ok(i64::try_from(number).map_or(Matched::Other, Matched::Number))
            }

            fn visit_f64<E>(self, _: f64) -> Result<Matched, E> {
                Ok(Matched::Other)
            }

            fn visit_bool<E>(self, _: bool) -> Result<Matched, E> {
                Ok(Matched::Other)
            }

            fn visit_unit<E>(self) -> Result<Matched, E> {
                Ok(Matched::Other)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Matched, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Matched::Other)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Matched, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Matched::Other)
            }
        }
        deserializer.deserialize_any(Sign)
    }
}
