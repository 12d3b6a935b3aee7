//! Where statements begin and end in a text: at each `;` that is in no string, quoted name or comment. Pure.

/// What a text ends inside of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inside {
    /// Nothing, or a statement that is not ended yet.
    Statement,
    /// `'...`
    Text,
    /// `"...`
    Name,
    /// `/* ...`
    Comment,
}

/// A text taken apart.
#[derive(Debug, PartialEq, Eq)]
pub struct Split<'a> {
    /// The statements that are ended, without the semicolon and the white space around them. None is empty.
    pub complete: Vec<&'a str>,
    /// What is behind the last semicolon.
    pub rest: &'a str,
    /// What `rest` ends inside of.
    pub inside: Inside,
}

impl Split<'_> {
    /// Whether anything but white space and comments is left behind the last semicolon.
    pub fn has_rest(&self) -> bool {
        self.inside != Inside::Statement || !is_blank(self.rest)
    }
}

/// Takes a text apart into statements.
pub fn split(text: &str) -> Split<'_> {
    let bytes = text.as_bytes();
    let mut complete = Vec::new();
    let mut start = 0;
    let mut at = 0;
    let mut inside = Inside::Statement;
    while at < bytes.len() {
        inside = match (bytes[at], bytes.get(at + 1)) {
            (b'\'', _) => skip_quoted(bytes, &mut at, b'\'', Inside::Text),
            (b'"', _) => skip_quoted(bytes, &mut at, b'"', Inside::Name),
            (b'-', Some(b'-')) => skip_line(bytes, &mut at),
            (b'/', Some(b'*')) => skip_comment(bytes, &mut at),
            (b';', _) => {
                let statement = text[start..at].trim();
                if !is_blank(statement) {
                    complete.push(statement);
                }
                at += 1;
                start = at;
                Inside::Statement
            }
            _ => {
                at += 1;
                Inside::Statement
            }
        };
    }
    Split { complete, rest: text[start..].trim(), inside }
}

/// A doubled quote is part of what is quoted: it reads as an end and a new beginning, which comes to the same.
fn skip_quoted(bytes: &[u8], at: &mut usize, quote: u8, inside: Inside) -> Inside {
    let end = bytes[*at + 1..].iter().position(|b| *b == quote);
    *at = end.map_or(bytes.len(), |i| *at + i + 2);
    if end.is_some() { Inside::Statement } else { inside }
}

fn skip_line(bytes: &[u8], at: &mut usize) -> Inside {
    *at = bytes[*at..].iter().position(|b| *b == b'\n').map_or(bytes.len(), |i| *at + i + 1);
    Inside::Statement
}

/// Comments nest.
fn skip_comment(bytes: &[u8], at: &mut usize) -> Inside {
    let mut depth = 0;
    while *at < bytes.len() {
        match bytes.get(*at..*at + 2) {
            Some(b"/*") => {
                depth += 1;
                *at += 2;
            }
            Some(b"*/") => {
                depth -= 1;
                *at += 2;
                if depth == 0 {
                    return Inside::Statement;
                }
            }
            _ => *at += 1,
        }
    }
    Inside::Comment
}

/// Whether there is nothing but white space and comments.
fn is_blank(text: &str) -> bool {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        match (bytes[at], bytes.get(at + 1)) {
            (b'-', Some(b'-')) => skip_line(bytes, &mut at),
            (b'/', Some(b'*')) => skip_comment(bytes, &mut at),
            (byte, _) if byte.is_ascii_whitespace() => {
                at += 1;
                Inside::Statement
            }
            _ => return false,
        };
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(text: &str) -> (Vec<&str>, &str, Inside) {
        let split = split(text);
        (split.complete, split.rest, split.inside)
    }

    #[test]
    fn statements_end_at_semicolons() {
        assert_eq!(parts("select 1; select 2 ;\nselect"), (vec!["select 1", "select 2"], "select", Inside::Statement));
        assert_eq!(parts(";; ;"), (vec![], "", Inside::Statement));
        assert_eq!(parts(""), (vec![], "", Inside::Statement));
    }

    #[test]
    fn semicolons_in_quotes_and_comments_do_not_count() {
        let text = "select 'a;''b;' as \"x;\"\"y\" -- c;\n, 1 /* d; /* e; */ f; */; rest";
        let whole = "select 'a;''b;' as \"x;\"\"y\" -- c;\n, 1 /* d; /* e; */ f; */";
        assert_eq!(parts(text), (vec![whole], "rest", Inside::Statement));
        assert_eq!(parts("select -1; select 4 / 2;").0, ["select -1", "select 4 / 2"]);
        assert_eq!(parts("select 'ä;ß';").0, ["select 'ä;ß'"]);
    }

    #[test]
    fn what_is_open_at_the_end_is_known() {
        assert_eq!(parts("select 'a;").2, Inside::Text);
        assert_eq!(parts("select \"a;").2, Inside::Name);
        assert_eq!(parts("select 1; /* a; /* b */").2, Inside::Comment);
        assert_eq!(parts("select '").2, Inside::Text);
        assert_eq!(parts("/*/").2, Inside::Comment);
    }

    #[test]
    fn comments_alone_are_no_statement() {
        assert_eq!(parts("-- nothing;\n;/* here */; select 1;").0, ["select 1"]);
        assert!(!split("select 1; -- done").has_rest());
        assert!(split("select 1; /* open").has_rest());
        assert!(split("select 1; select").has_rest());
    }
}
