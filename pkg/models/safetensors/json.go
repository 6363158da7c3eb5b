package safetensors

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// parser reads the JSON of headers and indexes. The standard decoder would ignore keys that repeat, and its tokens
// need much more memory than the result.
type parser struct {
	text []byte
	at   int
}

// peek skips white space and returns the next byte, 0 at the end.
func (p *parser) peek() byte {
	for ; p.at < len(p.text); p.at++ {
		switch c := p.text[p.at]; c {
		case ' ', '\t', '\r', '\n':
		default:
			return c
		}
	}
	return 0
}

// expect skips the byte want.
func (p *parser) expect(want byte) error {
	if p.peek() != want {
		return p.unexpected(strconv.QuoteRune(rune(want)))
	}
	p.at++
	return nil
}

// unexpected returns the error for anything other than want.
func (p *parser) unexpected(want string) error {
	if p.peek() == 0 {
		return io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%s; must be %s", p.nextWord(), want)
}

// nextWord returns the text up to the next white space, comma or closing bracket, without moving on: a number, or what
// an error shows. Text that begins with one of these has no word; the error shows it with what follows. Of more than
// 24 bytes it returns the first, and "...".
func (p *parser) nextWord() string {
	const most = 24
	rest := p.text[p.at:]
	if end := bytes.IndexAny(rest, " \t\r\n,]}"); end > 0 {
		rest = rest[:end]
	}
	if len(rest) > most {
		return string(bytes.ToValidUTF8(rest[:most], nil)) + "..."
	}
	return string(rest)
}

// readList reads a list or an object between begin and end: it calls item, which reads one element,
// for each. Errors are those of item and of syntax.
func (p *parser) readList(begin, end byte, item func() error) error {
	if err := p.expect(begin); err != nil {
		return err
	}
	if p.peek() == end {
		return p.expect(end)
	}
	for {
		if err := item(); err != nil {
			return err
		}
		if p.peek() != ',' {
			return p.expect(end)
		}
		p.at++
	}
}

// readObject reads an object: it calls field, which reads the value, after each key. A repeated key
// is an error, unlike in encoding/json, as two readers could take different ones.
func (p *parser) readObject(field func(key string) error) error {
	var few [4]string // enough for the entry of a tensor, the most frequent object
	var seen map[string]bool
	n := 0
	return p.readList('{', '}', func() error {
		key, err := p.readString()
		if err != nil {
			return err
		}
		if n < len(few) {
			for _, k := range few[:n] {
				if k == key {
					return fmt.Errorf("key %q appears twice", key)
				}
			}
			few[n] = key
			n++
		} else {
			if seen == nil {
				seen = map[string]bool{}
				for _, k := range few {
					seen[k] = true
				}
			}
			if seen[key] {
				return fmt.Errorf("key %q appears twice", key)
			}
			seen[key] = true
		}
		if err := p.expect(':'); err != nil {
			return err
		}
		return field(key)
	})
}

// readString reads a string. Anything else, a control character in it, and the end of the text are
// errors.
func (p *parser) readString() (string, error) {
	if p.peek() != '"' {
		return "", p.unexpected("a string")
	}
	begin := p.at
	for i := begin + 1; i < len(p.text); i++ {
		switch c := p.text[i]; {
		case c == '"':
			p.at = i + 1
			return string(p.text[begin+1 : i]), nil
		case c < ' ':
			return "", errors.New("control character in a string")
		case c == '\\':
			return p.escapedString()
		}
	}
	return "", io.ErrUnexpectedEOF
}

// escapedString is readString for a string with escapes, which are rare in headers. Escapes that
// are not valid are errors.
func (p *parser) escapedString() (s string, err error) {
	for i := p.at + 1; i < len(p.text); i++ {
		switch p.text[i] {
		case '\\':
			i++
		case '"':
			err = json.Unmarshal(p.text[p.at:i+1], &s)
			p.at = i + 1
			return s, err
		}
	}
	return "", io.ErrUnexpectedEOF
}

// readNumbers reads a list of at most most sizes: whole numbers of at least 0 that fit an int.
// Anything else is an error that names the field.
func (p *parser) readNumbers(field string, most int) ([]int, error) {
	ns := make([]int, 0, 4)
	err := p.readList('[', ']', func() error {
		if p.peek() == 0 {
			return io.ErrUnexpectedEOF
		}
		word := p.nextWord()
		n, err := strconv.ParseUint(word, 10, strconv.IntSize-1)
		if err != nil || len(word) > 1 && word[0] == '0' {
			return fmt.Errorf("%s is not a size", word)
		}
		if len(ns) == most {
			return fmt.Errorf("more than %d numbers", most)
		}
		p.at += len(word)
		ns = append(ns, int(n))
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	return ns, nil
}

// skip steps over any value, of a key of an index that has no meaning here. What is no JSON is an
// error.
func (p *parser) skip() error {
	dec := json.NewDecoder(bytes.NewReader(p.text[p.at:]))
	var value json.RawMessage
	if err := dec.Decode(&value); err != nil {
		return err
	}
	p.at += int(dec.InputOffset())
	return nil
}
