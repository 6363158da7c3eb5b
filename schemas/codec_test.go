package schemas_test

import (
	"bytes"
	"reflect"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// blank returns an empty event of e's type.
func blank(t testing.TB, e schemas.Event) schemas.Event {
	t.Helper()
	n, ok := schemas.New(e.Type())
	if !ok {
		t.Fatalf("New(%q) does not know the type", e.Type())
	}
	return n
}

func TestEncode_roundTrip(t *testing.T) {
	for _, s := range samples(t) {
		t.Run(s.name, func(t *testing.T) {
			if err := s.event.Validate(); err != nil {
				t.Fatalf("sample is not valid: %v", err)
			}
			data, err := schemas.Encode(s.event)
			if err != nil {
				t.Fatal(err)
			}
			got := blank(t, s.event)
			if err := schemas.DecodeValid(data, got); err != nil {
				t.Fatal(err)
			}
			want := blank(t, s.event)
			reflect.ValueOf(want).Elem().Set(reflect.ValueOf(s.event).Elem())
			reflect.ValueOf(want).Elem().FieldByName("V").SetInt(schemas.Version)
			if !reflect.DeepEqual(got, want) {
				t.Errorf("decoded\n%+v\nwant\n%+v", got, want)
			}
			again, err := schemas.Encode(got)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(again, data) {
				t.Errorf("encoded again: % x\nwant: % x", again, data)
			}
		})
	}
}
