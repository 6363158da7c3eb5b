package schemas

import (
	"reflect"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"
)

// Legal returns an event as Encode writes it: itself, or a copy in which texts and lists are cut.
func Legal(e Event) Event {
	if c, ok := withLegalTexts(reflect.ValueOf(e).Elem()); ok {
		return c.Addr().Interface().(Event)
	}
	return e
}

// withLegalTexts returns a copy of a struct in which texts and lists with the tag cut are legal; false if they are.
// Error texts may be too long or not UTF-8, as they come from a scorer, a driver, or the refused bytes themselves, and
// the event must go out. The original stays as it is.
func withLegalTexts(v reflect.Value) (reflect.Value, bool) {
	if !hasCut(v.Type()) {
		return v, false
	}
	changed := false
	set := func(f *Field, to reflect.Value) {
		if !changed {
			own := reflect.New(v.Type()).Elem()
			own.Set(v)
			v, changed = own, true
		}
		f.In(v).Set(to)
	}
	fields := Fields(v.Type())
	for i := range fields {
		f := &fields[i]
		switch x := f.In(v); {
		case x.Kind() == reflect.String && f.Cut:
			if s := legalText(x.String(), int(f.Size.High)); s != x.String() {
				set(f, reflect.ValueOf(s).Convert(x.Type()))
			}
		case x.Kind() == reflect.Slice && x.Type().Elem().Kind() == reflect.Struct && hasCut(x.Type().Elem()):
			if f.Cut && x.Len() > int(f.Size.High) {
				x = x.Slice(0, int(f.Size.High))
				set(f, x)
			}
			for i := range x.Len() {
				if item, ok := withLegalTexts(x.Index(i)); ok {
					own := reflect.MakeSlice(x.Type(), x.Len(), x.Len())
					reflect.Copy(own, x)
					own.Index(i).Set(item)
					x = own
					set(f, x)
				}
			}
		}
	}
	return v, changed
}

var cutTypes sync.Map // reflect.Type -> bool

// hasCut reports whether a struct, or one in its lists, has a field with the tag cut.
func hasCut(t reflect.Type) bool {
	if has, ok := cutTypes.Load(t); ok {
		return has.(bool)
	}
	has := slices.ContainsFunc(Fields(t), func(f Field) bool {
		return f.Cut || f.Type.Kind() == reflect.Slice && f.Type.Elem().Kind() == reflect.Struct &&
			hasCut(f.Type.Elem())
	})
	cutTypes.Store(t, has)
	return has
}

// legalText returns s as UTF-8 of at most limit bytes, cut between characters.
func legalText(s string, limit int) string {
	if len(s) > limit {
		cut := limit
		for cut > 0 && limit-cut < utf8.UTFMax && !utf8.RuneStart(s[cut]) {
			cut--
		}
		s = s[:cut]
	}
	s = strings.ToValidUTF8(s, "\uFFFD")
	for len(s) > limit { // a replaced byte takes three
		_, size := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-size]
	}
	return s
}
