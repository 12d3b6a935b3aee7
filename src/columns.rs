//! Tables for people.

/// Rows as aligned columns.
pub fn columns<const N: usize>(rows: Vec<[String; N]>) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let rows = vec![["ROLE", "ID"], ["metasrv", "1"]].into_iter().map(|r| r.map(str::to_owned)).collect();
        assert_eq!(columns(rows), "ROLE     ID\nmetasrv  1\n");
    }
}
