//! What happens to bytes on their way from one node to another.

use std::fmt;
use std::time::Duration;

/// How a path is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cut {
    /// Nothing arrives, and nobody is told: what was sent arrives once the path is sound again, as with lost packets.
    Silent,
    /// Connections are reset, new ones too.
    Reset,
}

/// What is wrong with a path. The default is a sound one.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Condition {
    pub cut: Option<Cut>,
    /// Everything arrives this much later.
    pub delay: Duration,
    /// And up to this much later still, at random.
    pub jitter: Duration,
    /// At most so many bytes per second on one connection.
    pub bytes_per_s: Option<u64>,
    /// The probability that a chunk has to be sent again, which takes [`RETRANSMISSION`].
    pub loss: f64,
    /// The probability that a chunk is the last one: the connection is reset instead.
    pub reset: f64,
}

/// How long TCP waits at least before it sends a lost packet again.
pub const RETRANSMISSION: Duration = Duration::from_millis(200);

impl Condition {
    /// Cut.
    pub fn cut(how: Cut) -> Self {
        Self { cut: Some(how), ..Self::default() }
    }

    /// Each part as bad as the worse of the two.
    #[must_use]
    pub fn worse(&self, other: &Condition) -> Condition {
        Condition {
            cut: self.cut.max(other.cut),
            delay: self.delay.max(other.delay),
            jitter: self.jitter.max(other.jitter),
            bytes_per_s: match (self.bytes_per_s, other.bytes_per_s) {
                (Some(one), Some(two)) => Some(one.min(two)),
                (one, two) => one.or(two),
            },
            loss: self.loss.max(other.loss),
            reset: self.reset.max(other.reset),
        }
    }

    /// How much later than it was sent a chunk of so many bytes arrives; `chance` gives numbers in 0..1. `None`: never, and
    /// the connection is reset.
    pub fn lateness(&self, bytes: usize, mut chance: impl FnMut() -> f64) -> Option<Duration> {
        if self.reset > 0.0 && chance() < self.reset {
            return None;
        }
        let mut late = self.delay;
        if !self.jitter.is_zero() {
            late += self.jitter.mul_f64(chance());
        }
        if self.loss > 0.0 && chance() < self.loss {
            late += RETRANSMISSION;
        }
        if let Some(rate) = self.bytes_per_s {
            late += Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
        }
        Some(late)
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        match self.cut {
            Some(Cut::Silent) => parts.push("cut".to_owned()),
            Some(Cut::Reset) => parts.push("reset".to_owned()),
            None => {}
        }
        if !self.delay.is_zero() || !self.jitter.is_zero() {
            parts.push(format!("{}+{} ms", self.delay.as_millis(), self.jitter.as_millis()));
        }
        if let Some(rate) = self.bytes_per_s {
            parts.push(format!("{rate} bytes/s"));
        }
        if self.loss > 0.0 {
            parts.push(format!("{:.0} % lost", self.loss * 100.0));
        }
        if self.reset > 0.0 {
            parts.push(format!("{:.1} % reset", self.reset * 100.0));
        }
        f.write_str(if parts.is_empty() { "sound" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lateness_adds_up_and_a_reset_ends_it() {
        let slow = Condition {
            delay: Duration::from_millis(10),
            jitter: Duration::from_millis(20),
            bytes_per_s: Some(1000),
            ..Condition::default()
        };
        assert_eq!(slow.lateness(100, || 0.5), Some(Duration::from_millis(10 + 10 + 100)));
        let lossy = Condition { loss: 0.3, reset: 0.1, ..Condition::default() };
        let mut numbers = [0.2, 0.2].into_iter();
        assert_eq!(lossy.lateness(1, || numbers.next().unwrap()), Some(RETRANSMISSION));
        assert_eq!(lossy.lateness(1, || 0.05), None);
        assert_eq!(Condition::default().lateness(1 << 20, || unreachable!()), Some(Duration::ZERO));
    }

    #[test]
    fn the_worse_of_two_has_the_worse_of_each_part() {
        let one = Condition { cut: Some(Cut::Silent), bytes_per_s: Some(10), ..Condition::default() };
        let two = Condition { cut: Some(Cut::Reset), loss: 0.5, ..Condition::default() };
        let both = one.worse(&two);
        assert_eq!(both, two.worse(&one));
        assert_eq!((both.cut, both.bytes_per_s, both.loss), (Some(Cut::Reset), Some(10), 0.5));
        assert_eq!(Condition::default().worse(&one), one);
    }
}
