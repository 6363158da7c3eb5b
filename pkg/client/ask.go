package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/schemas"
)

// Optional is a value of type T where zero says something of its own, as of a seed or a temperature: nil is not given.
// It takes any value, and Event refuses one of another type; an integer is a float64, too.
type Optional[T any] = any

// Ask publishes a prompt and waits until ctx ends for intake's answer: see Publish.
func (c *Client) Ask(ctx context.Context, run schemas.Run, p Prompt) (*schemas.Receipt, error) {
	e, err := p.Event()
	if err != nil {
		return nil, err
	}
	return c.Publish(ctx, run, e)
}

// Event returns the prompt as it is published. A number that is zero is not given, unless its field is Optional.
func (p Prompt) Event() (*schemas.Prompt, error) {
	e := &schemas.Prompt{}
	return e, fill(reflect.ValueOf(e).Elem(), reflect.ValueOf(p), "")
}

// fill gives the struct of an event the values of a literal. path names it in errors.
func fill(to, from reflect.Value, path string) error {
	if to.Type() == from.Type() {
		to.Set(from)
		return nil
	}
	switch from.Kind() {
	case reflect.Struct:
		for _, f := range schemas.Fields(to.Type()) {
			if v := from.FieldByName(f.GoName); v.IsValid() && !v.IsZero() {
				if err := fill(f.In(to), v, path+f.Name+"."); err != nil {
					return err
				}
			}
		}
		return nil
	case reflect.Slice:
		to.Set(reflect.MakeSlice(to.Type(), from.Len(), from.Len()))
		for i := range from.Len() {
			if err := fill(to.Index(i), from.Index(i), fmt.Sprintf("%s[%d].", path[:len(path)-1], i)); err != nil {
				return err
			}
		}
		return nil
	case reflect.Pointer:
		to.Set(reflect.New(to.Type().Elem()))
		return fill(to.Elem(), from.Elem(), path)
	}
	for from.Kind() == reflect.Interface || from.Kind() == reflect.Pointer {
		from = from.Elem() // of an Optional, which may be given as the event has it
	}
	want := to.Type().Elem()
	v := reflect.New(want)
	if !from.IsValid() || !from.CanConvert(want) || want.Kind() == reflect.String && from.Kind() != reflect.String ||
		want.Kind() == reflect.Int64 && !from.CanInt() {
		return fmt.Errorf("%s: %v; must be of type %v", path[:len(path)-1], from, want)
	}
	v.Elem().Set(from.Convert(want))
	to.Set(v)
	return nil
}

// ErrUnseen says why a state has no prediction now.
var ErrUnseen = errors.New("no prediction")

// Seen returns what the network takes a stored state of a sample for, as a PNG that a sampler of the lane makes: the
// sample that it would end with. The error is ErrUnseen where no sampler can say it.
func (c *Client) Seen(ctx context.Context, t *schemas.Trajectory, index int64) ([]byte, error) {
	question, err := json.Marshal(schemas.Seen{Run: t.Run, UID: t.UID, SampleIndex: t.SampleIndex, Step: index})
	if err != nil {
		return nil, err
	}
	m, err := c.ask(ctx, schemas.SeenSubject(t.Lane), question)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return nil, fmt.Errorf("%w: no sampler serves the lane %s now", ErrUnseen, t.Lane)
	case err != nil && ctx.Err() == nil:
		return nil, fmt.Errorf("%w: the sampler of the lane %s: %w", ErrUnseen, t.Lane, err)
	case err != nil:
		return nil, err
	}
	if why := m.Header.Get(schemas.HeaderSeenError); why != "" {
		return nil, fmt.Errorf("%w: %s", ErrUnseen, why)
	}
	return m.Data, nil
}
