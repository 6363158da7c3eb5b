package safetensors

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// parser reads JSON of a known form from bytes that are UTF-8. A general decoder would
// drop repeated keys, and one that hands out tokens costs many times what is kept.
type parser struct {
	text []byte
	at   int
}

// peek returns the next byte that is no space, 0 at the end.
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

// take steps over want.
func (p *parser) take(want byte) error {
	if p.peek() != want {
		return p.unexpected(strconv.QuoteRune(rune(want)))
	}
	p.at++
	return nil
}

// unexpected is the error of something else than want.
func (p *parser) unexpected(want string) error {
	if p.peek() == 0 {
		return io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%s; must be %s", p.word(), want)
}

// word is what comes next, for messages.
func (p *parser) word() string {
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

// list calls item before each element up to end.
func (p *parser) list(begin, end byte, item func() error) error {
	if err := p.take(begin); err != nil {
		return err
	}
	if p.peek() == end {
		return p.take(end)
	}
	for {
		if err := item(); err != nil {
			return err
		}
		if p.peek() != ',' {
			return p.take(end)
		}
		p.at++
	}
}

// object calls field after each key of an object; a repeated key is an error.
func (p *parser) object(field func(key string) error) error {
	var few [4]string // most objects are a tensor's
	var seen map[string]bool
	n := 0
	return p.list('{', '}', func() error {
		key, err := p.string()
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
		if err := p.take(':'); err != nil {
			return err
		}
		return field(key)
	})
}

func (p *parser) string() (string, error) {
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
			return p.escaped()
		}
	}
	return "", io.ErrUnexpectedEOF
}

// escaped is string where some characters are escaped.
func (p *parser) escaped() (s string, err error) {
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

// numbers reads a list of at most most sizes.
func (p *parser) numbers(field string, most int) ([]int, error) {
	ns := make([]int, 0, 4)
	err := p.list('[', ']', func() error {
		if p.peek() == 0 {
			return io.ErrUnexpectedEOF
		}
		word := p.word()
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

// skip steps over any value.
func (p *parser) skip() error {
	dec := json.NewDecoder(bytes.NewReader(p.text[p.at:]))
	var value json.RawMessage
	if err := dec.Decode(&value); err != nil {
		return err
	}
	p.at += int(dec.InputOffset())
	return nil
}
