//! Figures as people read them. What is absent becomes a dash.

use std::time::Duration;

use jiff::Timestamp;

/// Stands for a figure that is absent.
pub(super) const ABSENT: &str = "–";

/// 2677.4 -> "2,677"
pub(super) fn count(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::with_capacity(digits.len() + digits.len() / 3 + 1);
    if value < -0.5 {
        text.push('-');
    }
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// 0.7134 -> "0.71". A tiny negative number is zero, without a sign.
pub(super) fn real(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    match text.strip_prefix('-') {
        Some(rest) if rest.chars().all(|character| matches!(character, '0' | '.')) => rest.to_owned(),
        _ => text,
    }
}

/// 0.02 -> "+0.02"
pub(super) fn signed(value: f64, digits: usize) -> String {
    let text = real(value, digits);
    let is_above_zero = !text.starts_with('-') && text.chars().any(|character| matches!(character, '1'..='9'));
    if is_above_zero { format!("+{text}") } else { text }
}

/// A time in its largest two units: 250 s -> "4 min 10 s".
pub(super) fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    let units = [(86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")];
    let Some((large, large_unit, small, small_unit)) = units.into_iter().find(|(large, ..)| seconds >= *large) else {
        return format!("{seconds} s");
    };
    match (seconds / large, seconds % large / small) {
        (first, 0) => format!("{first} {large_unit}"),
        (first, rest) => format!("{first} {large_unit} {rest} {small_unit}"),
    }
}

/// The time from a moment of the service to now, or a dash.
pub(super) fn ago(moment: Option<&str>, now: Option<Timestamp>) -> String {
    let moment = moment.and_then(|moment| moment.parse::<Timestamp>().ok());
    match (moment, now) {
        (Some(moment), Some(now)) => duration(Duration::try_from(now.duration_since(moment)).unwrap_or_default()),
        _ => ABSENT.to_owned(),
    }
}

/// "1 policy", "3 policies"
pub(super) fn plural(number: usize, noun: &str, nouns: &str) -> String {
    format!("{} {}", count(number as f64), if number == 1 { noun } else { nouns })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_separated() {
        for (value, text) in [(0.0, "0"), (-0.2, "0"), (999.4, "999"), (999.5, "1,000"), (1_234_567.0, "1,234,567")] {
            assert_eq!(count(value), text);
        }
        assert_eq!(count(-12_345.0), "-12,345");
    }

    #[test]
    fn a_number_that_is_almost_zero_has_no_sign() {
        assert_eq!([real(-0.001, 2), real(-0.01, 2), real(0.7134, 2)], ["0.00", "-0.01", "0.71"]);
        assert_eq!([signed(0.001, 2), signed(0.02, 2), signed(-0.02, 2)], ["0.00", "+0.02", "-0.02"]);
    }

    #[test]
    fn a_time_has_its_largest_two_units() {
        let texts = [0, 59, 60, 250, 3_600, 3_660, 90_000, 172_800].map(|s| duration(Duration::from_secs(s)));
        assert_eq!(texts, ["0 s", "59 s", "1 min", "4 min 10 s", "1 h", "1 h 1 min", "1 d 1 h", "2 d"]);
    }

    #[test]
    fn a_moment_ahead_of_the_service_is_now() {
        let now = "2026-11-24T02:10:31Z".parse().ok();
        assert_eq!(ago(Some("2026-11-24T02:10:01.5Z"), now), "29 s");
        assert_eq!(ago(Some("2026-11-24T02:11:00Z"), now), "0 s");
        assert_eq!((ago(None, now), ago(Some("now"), now)), (ABSENT.to_owned(), ABSENT.to_owned()));
    }
}
