//! Shapes and text of inline SVG. Whatever comes from a run is escaped here and nowhere else.

use std::fmt::{self, Display, Formatter, Write};

/// Text as it may stand in HTML, in elements and in attributes.
pub(super) struct Escaped<T>(pub T);

impl<T: Display> Display for Escaped<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for c in self.0.to_string().chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // What no document may hold, not even escaped.
                c if c.is_control() && c != '\n' && c != '\t' => f.write_char('\u{fffd}')?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// A picture under construction.
pub(super) struct Svg {
    width: f64,
    height: f64,
    body: String,
}

impl Svg {
    pub fn new(width: f64, height: f64) -> Self {
        Svg { width, height, body: String::new() }
    }

    /// A rectangle with a text that is shown when it is pointed at.
    pub fn rect(&mut self, class: &str, [x, y, width, height]: [f64; 4], title: &str) {
        self.element(format_args!(
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{height:.1}\"><title>{}</title></rect>",
            width.max(0.5),
            Escaped(title)
        ));
    }

    pub fn line(&mut self, class: &str, [x1, y1, x2, y2]: [f64; 4]) {
        self.element(format_args!(
            "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>"
        ));
    }

    /// Lines through points; `None` interrupts them. A point between two interruptions is a dot.
    pub fn path(&mut self, class: &str, points: impl IntoIterator<Item = Option<(f64, f64)>>) {
        let (mut path, mut begins) = (String::new(), true);
        for point in points {
            if let Some((x, y)) = point {
                // A line to the point itself makes a dot of a lone one.
                let _ = match begins {
                    true => write!(path, "M{x:.1} {y:.1}l0 0"),
                    false => write!(path, "L{x:.1} {y:.1}"),
                };
            }
            begins = point.is_none();
        }
        self.element(format_args!("<path class=\"{class}\" d=\"{path}\"/>"));
    }

    /// Text whose anchor (`start`, `middle`, `end`) is at a point.
    pub fn text(&mut self, class: &str, anchor: &str, (x, y): (f64, f64), text: impl Display) {
        let text = Escaped(text);
        self.element(format_args!(
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"
        ));
    }

    /// A curve from one point to another, with an arrow at its end.
    pub fn arrow(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64), title: &str) {
        let bend = ((x2 - x1).abs() / 4.0).clamp(12.0, 60.0);
        let (cx, cy) = ((x1 + x2) / 2.0, (y1 + y2) / 2.0 - if (y1 - y2).abs() < 1.0 { bend } else { 0.0 });
        self.element(format_args!(
            "<path class=\"{class}\" marker-end=\"url(#arrow)\" d=\"M{x1:.1} {y1:.1}Q{cx:.1} {cy:.1} {x2:.1} {y2:.1}\"><title>{}</title></path>",
            Escaped(title)
        ));
    }

    fn element(&mut self, element: fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = self.body.write_fmt(element);
        self.body.push('\n');
    }

    /// The whole picture; `label` says what it shows.
    pub fn finish(self, label: &str) -> String {
        format!(
            "<svg viewBox=\"0 0 {:.0} {:.0}\" role=\"img\" aria-label=\"{}\">\n{}</svg>\n",
            self.width,
            self.height,
            Escaped(label),
            self.body
        )
    }
}
