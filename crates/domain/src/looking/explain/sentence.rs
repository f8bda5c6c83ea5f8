//! Numbers in words, as the live page and the command write them. Every function accepts every number.

use crate::staleness::UnderWay;

/// What stands for a number that is not finite.
const NONE: &str = "–";

/// 2677 -> "2,677"
pub fn count(value: i64) -> String {
    let digits = value.unsigned_abs().to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if value < 0 { format!("−{text}") } else { text }
}

/// (3, "group") -> "3 groups"
pub fn plural(value: i64, noun: &str) -> String {
    let number = count(value);
    match noun.strip_suffix("ry") {
        _ if value == 1 => format!("{number} {noun}"),
        Some(stem) => format!("{number} {stem}ries"),
        None if noun.ends_with("ch") => format!("{number} {noun}es"),
        None => format!("{number} {noun}s"),
    }
}

/// "is" or "are"
pub fn is(value: i64) -> &'static str {
    if value == 1 { "is" } else { "are" }
}

/// "was" or "were"
pub fn was(value: i64) -> &'static str {
    if value == 1 { "was" } else { "were" }
}

/// 250 -> "4 min 10 s"
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() {
        return NONE.to_owned();
    }
    let whole = seconds.max(0.0).round() as i64;
    if whole == 0 && seconds > 0.0 {
        return "less than 1 s".to_owned();
    }
    let (large, large_unit, small, small_unit) = match whole {
        0..60 => return format!("{whole} s"),
        60..3_600 => (60, "min", 1, "s"),
        3_600..86_400 => (3_600, "h", 60, "min"),
        _ => (86_400, "d", 3_600, "h"),
    };
    let rest = whole % large / small;
    let first = format!("{} {large_unit}", count(whole / large));
    if rest == 0 { first } else { format!("{first} {rest} {small_unit}") }
}

/// The same of microseconds.
pub fn duration_us(micros: i64) -> String {
    duration(seconds(micros))
}

/// Microseconds as seconds.
pub fn seconds(micros: i64) -> f64 {
    micros as f64 / 1e6
}

/// 0.97 -> "97%". Neither "all" nor "none" is claimed of what is almost so.
pub fn percent(share: f64) -> String {
    if !share.is_finite() {
        return NONE.to_owned();
    }
    let value = share * 100.0;
    match value {
        _ if value > 0.0 && value < 1.0 => "<1%".to_owned(),
        _ if value < 100.0 && value > 99.0 => ">99%".to_owned(),
        _ => format!("{value:.0}%"),
    }
}

/// 429496729 -> "0.4 GiB"
pub fn bytes(value: i64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut scaled = value.max(0) as f64;
    if scaled < 1_024.0 {
        return format!("{} B", count(value.max(0)));
    }
    let mut unit = "B";
    for next in units {
        if scaled < 102.4 {
            break;
        }
        scaled /= 1_024.0;
        unit = next;
    }
    format!("{scaled:.1} {unit}")
}

/// 1.234 -> "1.2"
pub fn real(value: f64) -> String {
    if value.is_finite() { format!("{value:.1}") } else { NONE.to_owned() }
}

/// A part of a whole as a number from 0 to 1; 0 of nothing.
pub fn share(part: i64, whole: i64) -> f64 {
    if whole > 0 { (part as f64 / whole as f64).clamp(0.0, 1.0) } else { 0.0 }
}

pub fn consumer(name: &str) -> String {
    if name.is_empty() { "a trainer without a name".to_owned() } else { name.to_owned() }
}

/// A rollout that is waited for.
pub fn under_way(rollout: &UnderWay) -> String {
    match rollout {
        UnderWay::Session { rollout_id, .. } => format!("rollout {rollout_id}"),
        UnderWay::Admission(admission_id) => format!("a rollout of admission {}", short_id(&admission_id.to_string())),
        UnderWay::Scoring { rollout_id } => format!("the scores of rollout {rollout_id}"),
    }
}

/// A long id by its ends.
pub fn short_id(id: &str) -> String {
    let characters: Vec<char> = id.chars().collect();
    if characters.len() <= 12 {
        return id.to_owned();
    }
    let ends = |part: &[char]| part.iter().collect::<String>();
    format!("{}…{}", ends(&characters[..4]), ends(&characters[characters.len() - 4..]))
}

/// "in 15 min", or "in 4 min 10 s" if the history of the policy is shorter.
pub fn within(seconds: i64) -> String {
    format!("in {}", duration(seconds as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_people_write_them() {
        assert_eq!([count(0), count(999), count(2677), count(-1_234_567)], ["0", "999", "2,677", "−1,234,567"]);
        assert_eq!([plural(1, "batch"), plural(2, "batch"), plural(0, "group")], ["1 batch", "2 batches", "0 groups"]);
        assert_eq!([plural(1, "delivery"), plural(5, "delivery")], ["1 delivery", "5 deliveries"]);
        let durations = [0.0, 0.2, 59.4, 60.0, 250.0, 7_500.0, 90_000.0, f64::NAN].map(duration);
        assert_eq!(durations, ["0 s", "less than 1 s", "59 s", "1 min", "4 min 10 s", "2 h 5 min", "1 d 1 h", "–"]);
        assert_eq!(
            [0.0, 0.001, 0.97, 0.998, 1.0, f64::INFINITY].map(percent),
            ["0%", "<1%", "97%", ">99%", "100%", "–"]
        );
        assert_eq!([bytes(12), bytes(429_496_729), bytes(8_589_934_592)], ["12 B", "0.4 GiB", "8.0 GiB"]);
        let shares = [share(1, 0), share(3, 4), share(-1, 4), share(9, 4)].map(percent);
        assert_eq!(shares, ["0%", "75%", "0%", "100%"]);
    }
}
