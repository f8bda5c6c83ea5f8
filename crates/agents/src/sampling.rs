//! Sampling as engines are told.

use forebay_gateway::upstream::Sampling;

/// The number as the producer wrote it, which is its shortest decimal: 0.7 and not 0.699999988079071.
pub(crate) fn widened(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

/// The sampling as engines are told.
pub(crate) fn told(sampling: forebay_wire::Sampling) -> Sampling {
    Sampling {
        temperature: widened(sampling.temperature),
        top_p: widened(sampling.top_p),
        top_k: sampling.top_k.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_sent_the_number_that_the_producer_wrote() {
        let wire = forebay_wire::Sampling { temperature: 0.7, top_p: 0.95, top_k: -1 };
        assert_eq!(told(wire), Sampling { temperature: 0.7, top_p: 0.95, top_k: -1 });
    }
}
